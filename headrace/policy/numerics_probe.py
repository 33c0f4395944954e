"""The probe of exact mode: tests whether a row has the same bits on this machine for every batch.

Idea: exact mode needs properties of the CPU and its libraries that no documentation guarantees. So the probe runs the
functions of the model, in the model's own shapes, on few rows and on many, and compares bits. It takes the smallest row
padding that passes; if none passes, it refuses exact mode and names the operation that failed.

Operands cancel: they come in pairs whose products are x and -x at random places of the reduction, so that the exact
sum is 0 and the result is nothing but the rounding of the partial sums. Another order of the sums then changes a fifth
of all results, also after rounding to 16 bits; with random operands it changes one in thousands, and the probe would
miss it (it did: a bfloat16 router of 64 x 8 passed with a padding of 4 rows and needs 9).

The fingerprint names the arithmetic: a hash over a small forward of the model's widths, the torch version, the
instruction set and the row padding. Two processes with one fingerprint compute the same bits; with different ones
(another CPU, say) expect differences of one rounding.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.kernels import batch_invariant, block_attention, expert_mlp, mxfp8
from headrace.kernels.block_attention import BLOCK, Packing
from headrace.kernels.route import Rule, route, sigmoid
from headrace.kernels.selected_logprob import from_logits, scaled
from headrace.policy.adapters import low_rank, shape
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics

PADS = (4, 8, 16, 32)
"""Row paddings that are tried, the smallest first."""
_COUNTS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 100)
_MANY = 500
_WIDEST = 4096

_Operands = tuple[Tensor, Tensor]


def probe(config: PolicyConfig, *, exact: bool = True, seed: int = 0) -> Numerics:
    """Find the row padding for this model on this machine, with the torch threads now set. Under a second.

    exact=False asks for ordinary arithmetic. Where exact mode does not hold, the result has exact=False and the reason;
    a caller that was asked for exact mode must then refuse to run.
    """
    reason = "" if exact else "not asked for"
    pad = 1
    if exact:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            pad, reason = _smallest_pad(config, generator)
            reason = reason or _elementwise(config, generator)
    numerics = Numerics(exact=not reason, row_pad=pad if not reason else 1, reason=reason, fingerprint="")
    return msgspec.structs.replace(numerics, fingerprint=_fingerprint(config, numerics))


def _pairs(generator: torch.Generator, k: int) -> tuple[Tensor, Tensor]:
    """A random pairing of k places: (index int64 [k] below max(1, k // 2), sign float32 [k]).

    x[..., index] times u[..., index] * sign sums to 0 exactly; an odd place out has sign 0.
    """
    half = max(1, k // 2)
    place = torch.randperm(k, generator=generator)
    sign = torch.where(place < half, 1.0, -1.0) * (place < 2 * half)
    return place % half, sign


def cancelling(generator: torch.Generator, dtype: torch.dtype, rows: int, shape: Sequence[int]) -> _Operands:
    """x [rows, K] and weight [..., N, K] of `shape` whose products are 0 but for rounding."""
    index, sign = _pairs(generator, shape[-1])
    x = torch.randn(rows, len(index), generator=generator)[:, index]
    weight = torch.randn(*shape, generator=generator)[..., index] * sign
    return x.to(dtype), weight.to(dtype)


def _draw(generator: torch.Generator, config: PolicyConfig, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(config.torch_dtype)


def products(config: PolicyConfig) -> list[tuple[int, int]]:
    """(K, N) of every product of the model; N is cut where a probe of all of it would take too long."""
    c = config
    widths = {c.expert_dim, c.dense_dim or c.expert_dim, c.shared_experts * c.expert_dim or c.expert_dim}
    shapes = [(c.dim, c.vocab)]
    for width in widths:
        shapes += [(c.dim, 2 * width), (width, c.dim)]
    if c.latent is None:
        shapes += [(c.dim, (c.heads + 2 * c.kv_heads) * c.head_dim), (c.heads * c.head_dim, c.dim)]
    else:
        low = c.latent
        shapes += [(low.q_rank or c.dim, c.heads * c.head_dim), (c.dim, low.kv_rank + low.rope_dim)]
        shapes += [(low.kv_rank, c.heads * (low.nope_dim + low.value_dim)), (c.heads * low.value_dim, c.dim)]
        shapes += [(c.dim, low.q_rank)] if low.q_rank else []
    if c.experts:
        shapes.append((c.dim, c.experts))
    for module in shape.targeted(c, 0):
        rank = c.adapter.rank if c.adapter else 0
        shapes += [(module.inputs, rank), (rank, module.outputs)]
    return sorted({(k, min(n, _WIDEST)) for k, n in shapes})


def _smallest_pad(config: PolicyConfig, generator: torch.Generator) -> tuple[int, str]:
    """(pad, "") or (1, what failed with the largest)."""
    dtype = config.torch_dtype
    operands = [cancelling(generator, dtype, _MANY, (n, k)) for k, n in products(config)]
    if config.scores == "sigmoid":  # the router's product is float32 there
        operands.append(cancelling(generator, torch.float32, _MANY, (config.experts, config.dim)))
    attention, experts = _attention_operands(config, generator), _expert_operands(config, generator)
    reason = ""
    for pad in PADS:
        failure = next(_differing_products(operands, pad), "")
        reason = f"rows of a matrix product depend on their number even when padded to {pad} ({failure})"
        if not failure:
            reason = _attention(config, pad, attention) or _experts(config, pad, experts)
        if not reason:
            return pad, ""
    return 1, reason


def _differing_products(operands: list[_Operands], pad: int) -> Iterator[str]:
    """One text for each product whose rows differ with this padding."""
    for x, weight in operands:
        many = batch_invariant.linear(x, weight, pad)
        for count in _COUNTS:
            for at in (0, pad, 3 * pad + 1):
                if not torch.equal(batch_invariant.linear(x[at : at + count], weight, pad), many[at : at + count]):
                    yield f"{count} rows, {weight.shape[1]} to {weight.shape[0]}"


def _elementwise(config: PolicyConfig, generator: torch.Generator) -> str:
    """Norms, activation, softmax and others: a row alone against the same row in a batch. The reason, or nothing."""
    c = config
    x = _draw(generator, c, _MANY, c.dim)
    gate_up = _draw(generator, c, _MANY, 2 * c.expert_dim) * 3
    logits = _draw(generator, c, _MANY, min(c.vocab, _WIDEST)) * 4
    targets = torch.randint(0, logits.shape[1], (_MANY,), generator=generator)
    heads = _draw(generator, c, _MANY, c.heads, c.head_dim)
    scores = torch.randn(_MANY, max(c.experts, 2), generator=generator)
    positive = torch.rand(_MANY, generator=generator) * 50 + 1
    checks: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "rms_norm": (x, lambda t: batch_invariant.rms_norm(t, torch.ones(c.dim, dtype=t.dtype), c.eps)),
        "head norm": (heads, lambda t: batch_invariant.rms_norm(t, torch.ones(t.shape[1:], dtype=t.dtype), c.eps)),
        "swiglu": (gate_up, batch_invariant.swiglu),
        "log-softmax": (logits, lambda t: from_logits(scaled(t, 0.7), targets[: len(t)])[2]),
        "entropy": (logits, lambda t: from_logits(scaled(t, 0.7), targets[: len(t)])[1]),
        "softmax": (scores, lambda t: torch.softmax(t, -1)),
        "sigmoid": (scores, sigmoid),
        "exp": (scores, torch.exp),
        "log": (positive, torch.log),
        "division": (positive, lambda t: 1 / t),
    }
    for name, (operand, function) in checks.items():
        many = function(operand)
        for count in _COUNTS:
            if not torch.equal(function(operand[:count]), many[:count]):
                return f"{name} of {count} rows differs from the same rows among {_MANY}"
    return ""


class _AttentionOperands(NamedTuple):
    """Packed sequences of `lengths`: q [N, H, D], k and v [N, V, D]."""

    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def _attention_operands(config: PolicyConfig, generator: torch.Generator) -> list[_AttentionOperands]:
    """Ordinary operands with ragged lengths; scores that cancel; weighted values that cancel."""
    c = config
    ragged, whole = [2 * BLOCK + 6, 40], [3 * BLOCK, BLOCK]

    def drawn(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_draw(generator, c, sum(lengths), heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads))
        return q, k, v

    plain = _AttentionOperands(ragged, *drawn(ragged), c.head_dim**-0.5)
    q, k, v = drawn(whole)
    index, sign = _pairs(generator, c.head_dim)
    q, k = q[..., index], k[..., index] * sign.to(k.dtype)
    # The scores are rounding errors of about 1e-7: the scale makes them as large as ordinary ones.
    spread = float((q[:BLOCK, 0] @ k[:BLOCK, 0].T).float().std())
    scores = _AttentionOperands(whole, q, k, v, 1.0 / spread if spread > 0 else c.head_dim**-0.5)
    q, k, v = drawn(whole)
    index, sign = _pairs(generator, BLOCK)
    # Pairs of keys within a block are equal, their values opposite: a query that sees whole blocks adds up to 0.
    at = (torch.arange(0, sum(whole), BLOCK)[:, None] + index).view(-1)
    sign = sign.repeat(sum(whole) // BLOCK)[:, None, None].to(v.dtype)
    values = _AttentionOperands(whole, q, k[at], v[at] * sign, c.head_dim**-0.5)
    return [plain, scores, values]


def _attention(config: PolicyConfig, pad: int, operands: list[_AttentionOperands]) -> str:
    """Full sequences against one query, a few, and a batch over a cache. The reason, or nothing."""
    return next(filter(None, (_attention_differs(config, pad, case) for case in operands)), "")


def _attention_differs(config: PolicyConfig, pad: int, case: _AttentionOperands) -> str:
    lengths, q, k, v, scale = case
    full = block_attention.packed_attention(q, k, v, Packing(lengths), scale)
    blocks = [-(-length // BLOCK) for length in lengths]

    def pooled(x: Tensor) -> Tensor:
        pool = x.new_zeros(sum(blocks) * BLOCK, *x.shape[1:])
        pool[: lengths[0]], pool[blocks[0] * BLOCK : blocks[0] * BLOCK + lengths[1]] = torch.split(x, lengths)
        return pool.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2).contiguous()

    keys, values = pooled(k), pooled(v)
    table = torch.tensor([list(range(blocks[0])), [blocks[0]] + [0] * (blocks[0] - 1)])
    first, second = torch.split(full, lengths)
    group = config.heads // config.kv_heads
    least = block_attention.least_height(config.head_dim, q.dtype)
    for steps in (1, 2, 5, 33):
        at = torch.tensor([[lengths[0] - steps], [lengths[1] - steps]]) + torch.arange(steps)
        query = torch.stack((q[at[0]], q[at[1] + lengths[0]]))
        pages = block_attention.paging(table, at, group, pad, least)
        got = block_attention.cached_attention(query, keys, values, pages, scale)
        if not (torch.equal(got[0], first[at[0]]) and torch.equal(got[1], second[at[1]])):
            return f"attention of {steps} new tokens over a cache differs from attention over the whole sequence"
        pages = block_attention.paging(table[1:, :1], at[1:], group, pad, least)
        alone = block_attention.cached_attention(query[1:], keys, values, pages, scale)
        if not torch.equal(alone[0], second[at[1]]):
            return f"attention of {steps} new tokens differs alone and in a batch"
    return ""


class _ExpertOperands(NamedTuple):
    """x [N, D] with router scores [N, E]; gate_up [E, 2I, D], down [E, D, I]."""

    x: Tensor
    scores: Tensor
    gate_up: Tensor
    down: Tensor
    cast: expert_mlp.Cast


def _expert_operands(config: PolicyConfig, generator: torch.Generator) -> list[_ExpertOperands]:
    """Ordinary operands in the experts' number format; then a first and a second product that cancel.

    The products are the same functions with and without a cast, which works row by row: the cancelling operands go
    without, because rounding to eight bits would spoil their pairs.
    """
    c = config
    if not c.experts:
        return []
    up, low = (c.experts, 2 * c.expert_dim, c.dim), (c.experts, c.dim, c.expert_dim)
    scores = torch.randn(_MANY, c.experts, generator=generator)
    x, gate_up, down = _draw(generator, c, _MANY, c.dim), _draw(generator, c, *up), _draw(generator, c, *low)
    gate_up, down = gate_up * c.dim**-0.5, down * c.expert_dim**-0.5
    cast = mxfp8.rounded if c.expert_format == "mxfp8" else expert_mlp.as_is
    cases = [_ExpertOperands(x, scores, gate_up, down, cast)]
    twins, opposites = cancelling(generator, c.torch_dtype, _MANY, up)
    cases.append(_ExpertOperands(twins, scores, opposites, down, expert_mlp.as_is))
    index, sign = _pairs(generator, c.expert_dim)
    paired = gate_up[:, torch.cat((index, index + c.expert_dim))]  # equal rows: equal inner activations
    opposites = down[..., index] * sign.to(down.dtype)
    cases.append(_ExpertOperands(x, scores, paired, opposites, expert_mlp.as_is))
    return cases


def _experts(config: PolicyConfig, pad: int, operands: list[_ExpertOperands]) -> str:
    """Tokens through their experts, few and many at once. The reason, or nothing."""
    c = config
    rule = Rule(c.scores == "sigmoid", c.expert_groups, c.kept_groups, c.gate_scale)
    for x, scores, gate_up, down, cast in operands:
        gates, experts = route(scores, c.top_k, c.normalise_top_k, None, rule)
        many = expert_mlp.expert_mlp(x, gates, experts, gate_up, down, pad, cast)
        for count in _COUNTS:
            few = expert_mlp.expert_mlp(x[:count], gates[:count], experts[:count], gate_up, down, pad, cast)
            if not torch.equal(few, many[:count]):
                return f"experts of {count} tokens differ from the same tokens among {_MANY}"
    return ""


def _fingerprint(config: PolicyConfig, numerics: Numerics) -> str:
    """Readable head and 16 hex digits over the bits of a small forward."""
    layers = config.dense_layers + 1 if config.experts else 1
    small = msgspec.structs.replace(config, layers=layers, vocab=min(config.vocab, _WIDEST))
    with torch.no_grad():
        model = Model(small, numerics, seed=1)
        for name, parameter in model.named_parameters():
            if low_rank.is_adapter(name):  # zeros would hide the arithmetic of adapters
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
        lengths = (37, 70, 1)
        ids = torch.arange(sum(lengths)) * 7 % small.vocab
        logp, entropy = model.selected_logprobs(model(ids, lengths), ids.flip(0), 0.9)
    isa = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    torch_version = torch.__version__.split("+")[0]
    mode = f"exact{numerics.row_pad}" if numerics.exact else "ordinary"
    if numerics.exact and config.torch_dtype.itemsize == 2:
        mode += f"over{batch_invariant.SMALL}"  # runs that were recorded without `least_rows` have other bits
    digest = hashlib.sha256(f"{isa} {torch_version} {mode} {config.described}".encode())
    digest.update(torch.cat((logp, entropy)).numpy().tobytes())
    return f"cpu-{isa}-torch{torch_version}-{mode}-{digest.hexdigest()[:16]}"
