"""The operators `headrace::*`: what PyTorch demands of one, the twins' bits, and that the model calls them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels import delta, dispatch, expert_mlp, mxfp8, operators
from headrace.policy.cache import KVCache
from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics

EXACT = Numerics(exact=True, reason="", fingerprint="")
SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "expert_dim": 32, "vocab": 64}
POLICIES = {
    "dense": PolicyConfig(**SHAPE, experts=0, top_k=0),  # type: ignore[arg-type]
    "mixture": PolicyConfig(**SHAPE, experts=4, top_k=2, dtype="bfloat16", expert_format="mxfp8"),  # type: ignore[arg-type]
    "nvfp4": PolicyConfig(**SHAPE, experts=4, top_k=2, dtype="bfloat16", expert_format="nvfp4"),  # type: ignore[arg-type]
    "latent": PolicyConfig(
        **{**SHAPE, "kv_heads": 4, "head_dim": 24},  # type: ignore[arg-type]
        experts=4,
        top_k=2,
        latent=Latent(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16),
        scores="sigmoid",
        shared_experts=1,
        dense_layers=1,
    ),
}


def grown(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def cases() -> dict[str, tuple[Any, ...]]:
    """An operator's name -> arguments; those that need a gradient where it has one."""
    torch.manual_seed(0)
    x, weight, norm = grown(9, 32), grown(48, 32), grown(32)
    q, k, v = grown(13, 4, 16), grown(13, 2, 16), grown(13, 2, 16)
    lengths, pool = [9, 0, 4], torch.randn(4, 2, 64, 16)
    out, lse = (y.detach() for y in torch.ops.headrace.packed_attention(q, k, v, lengths, 0.25))
    logits, chosen = grown(9, 6), torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    gates, up, down = torch.rand(9, 2).requires_grad_(), grown(6, 64, 32), grown(6, 32, 32)
    inner = torch.ops.headrace.experts(x, gates, chosen, up, down, 4, "")[1].detach()
    order = chosen.reshape(-1).argsort(stable=True)
    source, slots = order // 2, order.argsort()
    targets, heat = torch.randint(0, 48, (9,)), torch.rand(9)
    scale = torch.ops.headrace.rms_norm(x, norm, 1e-6)[1].detach()
    sums = torch.ops.headrace.selected_logprob(x, weight, targets, heat, True)[2].detach()
    old, new = torch.arange(50, dtype=torch.int16), torch.arange(50, dtype=torch.int16)
    new[::7] += 3
    at, folded = delta.changes(old, new)
    codes, scales = mxfp8.quantise(x.detach())
    bare = [y.detach() for y in (x, weight, norm, q, k, v, gates, up, down, logits)]
    x_, weight_, norm_, q_, k_, v_, gates_, up_, down_, logits_ = bare
    return {
        "linear": (x, weight),
        "linear_backward": (torch.randn(9, 48), x_, weight_, True),
        "rms_norm": (x, norm, 1e-6),
        "rms_norm_backward": (torch.randn(9, 32), x_, norm_, scale),
        "rotate": (q, torch.rand(13, 1, 4), torch.rand(13, 1, 4), False),
        "swiglu": (grown(9, 64),),
        "swiglu_backward": (torch.randn(9, 64), torch.randn(9, 32)),
        "packed_attention": (q, k, v, lengths, 0.25),
        "packed_attention_backward": (torch.randn(13, 4, 16), q_, k_, v_, out, lse, lengths, 0.25),
        "cached_attention": (
            q_[:5],
            pool,
            torch.randn_like(pool),
            torch.tensor([[0, 1], [2, 0]]),
            [2, 3],
            [70, 5],
            0.25,
        ),
        "route": (logits, 2, True, chosen, None, False, 1, 1, 1.0, 0.0),
        "route_backward": (torch.rand(9, 2), logits_, chosen, True, False, 1.0),
        "experts": (x, gates, chosen, up, down, True, "nvfp4"),
        "experts_backward": (torch.randn(9, 32), x_, gates_, chosen, up_, down_, inner, True, "nvfp4", True, True),
        "permute": (x, source, slots),
        "unpermute": (grown(18, 32), slots, gates),
        "unpermute_backward": (torch.randn(9, 32), torch.randn(18, 32), slots, gates_),
        "selected_logprob": (x, weight, targets, heat, True),
        "selected_logprob_backward": (torch.randn(9), x_, weight_, targets, heat, sums, True),
        "quantise": (x_,),
        "quantise_nvfp4": (x_, torch.rand(9).exp2()),
        "dequantise": (codes.view(torch.uint8), scales, torch.bfloat16),
        "changes": (old, new),
        "apply_changes": (old, at, folded),
    }


@pytest.mark.slow
def test_every_operator_is_what_pytorch_expects_of_one() -> None:
    arguments = cases()
    names = torch._C._dispatch_get_all_op_names()
    assert {name.removeprefix("headrace::") for name in names if name.startswith("headrace::")} == set(arguments)
    for name, args in arguments.items():
        torch.library.opcheck(getattr(torch.ops.headrace, name).default, args)


def test_every_operator_has_a_body_for_a_gpu() -> None:
    """`interpreted_operators` runs them."""
    named = {name: one for name, one in OPDEFS.items() if name.startswith("headrace::")}
    assert len(named) >= 20 and [name for name, one in named.items() if "cuda" not in one._backend_fns] == []


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8 + 8 * 64 + 64), (100, 800 + 128 * 64 + 64)])
def test_experts_get_rows_for_as_many_of_them_as_have_any(tokens: int, rows: int) -> None:
    """A decoded token of a mixture moves the rows of its own experts."""
    chosen = torch.stack([torch.randperm(128)[:8] for _ in range(tokens)])
    up, down = torch.randn(128, 16, 8), torch.randn(128, 8, 8)
    operands = (torch.randn(tokens, 8), torch.rand(tokens, 8), chosen, up, down)
    out, inner = torch.ops.headrace.experts(*operands, 4, "")
    assert inner.shape == (rows, 16) and torch.equal(out, expert_mlp.expert_mlp(*operands, True))


def test_rounding_takes_the_operators_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "OPERATORS_ON_CPU", True)
    with Called() as called:
        got = operators.rounded(torch.randn(3, 64, generator=torch.Generator().manual_seed(1)))
    assert called.names == {"quantise", "dequantise"}
    monkeypatch.setattr(dispatch, "OPERATORS_ON_CPU", False)
    assert torch.equal(got, operators.rounded(torch.randn(3, 64, generator=torch.Generator().manual_seed(1))))


class Called(TorchDispatchMode):
    """Notes the operators that are called within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "headrace":
            self.names.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def computed(config: PolicyConfig) -> list[Tensor]:
    """Log-probabilities, gradients and hidden states over a cache: training and sampling with one policy."""
    model = Model(config, EXACT, seed=1)
    ids, lengths = torch.arange(81) * 7 % config.vocab, (70, 11)
    logp, entropy = model.selected_logprobs(model(ids, lengths), ids.flip(0), 0.9)
    torch.autograd.backward(logp.sum())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    cache = KVCache(config, 3)
    first = model.forward_cached(ids, lengths, (0, 0), ((0, 1), (2,)), cache)
    last = model.forward_cached(ids[:3], (2, 1), (70, 11), ((0, 1), (2,)), cache)
    return [logp.detach(), entropy, *gradients, first, last]


@pytest.mark.parametrize("name", POLICIES)
def test_the_dispatcher_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = POLICIES[name]
    direct = computed(config)
    monkeypatch.setattr(dispatch, "OPERATORS_ON_CPU", True)
    with Called() as called:
        dispatched = computed(config)
    assert all(torch.equal(a, b) for a, b in zip(direct, dispatched, strict=True))
    wanted = {"linear", "rms_norm", "packed_attention", "cached_attention", "selected_logprob", "rotate"}
    wanted |= {"route", "experts"} if config.experts else {"swiglu"}
    wanted |= {f"{operator}_backward" for operator in wanted - {"cached_attention", "rotate"}}
    assert wanted <= called.names
