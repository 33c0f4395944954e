"""Models small enough for every test: one with friendly widths, one with widths that fit no vector register."""

from collections.abc import Callable
from functools import cache

import torch

from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from headrace.policy.numerics_probe import probe

torch.set_num_threads(1)


def config(dtype: Dtype = "float32", **changes: int | bool | str) -> PolicyConfig:
    even: dict[str, object] = {
        "dim": 64, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 32, "experts": 8, "top_k": 2, "expert_dim": 64,
        "vocab": 320, "dtype": dtype,
    }  # fmt: skip
    return PolicyConfig(**(even | changes))  # type: ignore[arg-type]


def odd(dtype: Dtype = "float32") -> PolicyConfig:
    return config(dtype, dim=100, heads=4, kv_heads=2, head_dim=26, experts=5, top_k=3, expert_dim=83, vocab=257)


SHAPES: dict[str, Callable[[Dtype], PolicyConfig]] = {"even": config, "odd": odd}


@cache
def numerics(config: PolicyConfig, exact: bool = True, device: str = "cpu") -> Numerics:
    probed = probe(config, exact=exact, device=device)
    assert probed.exact == exact, probed.reason
    return probed


def model(config: PolicyConfig, *, exact: bool = True, seed: int = 1, device: str = "cpu") -> Model:
    """Weights far enough from their start that log-probabilities and routes differ between tokens."""
    made = Model(config, numerics(config, exact, device), seed=seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        made.head_weight.mul_(4.0)
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    if config.expert_format:
        made.load_state(made.state())  # onto the grid
    return made.to(device)


def tokens(config: PolicyConfig, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, config.vocab, (count,), generator=torch.Generator().manual_seed(seed))
