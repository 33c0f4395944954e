"""The random values of a new policy, one parameter after the other, so that no process has to hold all of them.

One generator draws all parameters in their order. A process that needs some rows of a parameter draws the whole of it
and keeps the rows: so rows have the same bits in one process and in several. Trade-off: every process draws everything.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from headrace.policy.adapters import low_rank
from headrace.policy.config import PolicyConfig


def values(config: PolicyConfig, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and initial values, float32 on the CPU before they are rounded, of every parameter but the adapters. The
    same seed gives the same values. Residual outputs start small, the head nearly flat.

    shapes: of all parameters, in the order of `Model.named_parameters`.
    """
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * config.layers) ** -0.5
    for name, shape in shapes.items():
        if low_rank.is_adapter(name):
            continue
        kind = name.rsplit(".", 1)[-1]
        if kind == "norm" or kind.endswith("_norm"):
            yield name, torch.ones(shape)
            continue
        if kind == "correction" or kind.endswith("_bias"):
            yield name, torch.zeros(shape)
            continue
        std = shape[-1] ** -0.5
        if kind in ("out", "down", "shared_down"):
            std *= shrink
        elif kind in ("embedding", "head"):
            std = 0.02 if kind == "head" or config.tied else 0.5
        yield name, torch.randn(shape, generator=generator, dtype=torch.float32).mul_(std)
