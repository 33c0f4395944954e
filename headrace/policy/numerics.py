"""Does this machine keep a row's bits whatever the batch? Found out at start, never assumed.

Idea: exact mode rests on properties of the CPU and of its libraries that nobody promises. So run the very functions
that the model uses, in the model's own shapes, alone and in company, and compare bits: smallest row padding that
passes wins; if none passes, exact mode is refused with the operation that failed. Silent degradation would be a lie
in every log-probability.

The fingerprint names the arithmetic: a hash over a small forward of the model's widths, the torch version, the
instruction set and the row padding. Two processes with one fingerprint compute the same bits; with different ones
(another CPU, say) expect differences of one rounding, and say so.
"""

import hashlib
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor

from headrace.kernels import batch_invariant, block_attention, expert_mlp, mxfp8
from headrace.kernels.block_attention import BLOCK, Packing
from headrace.kernels.route import Rule, route, sigmoid
from headrace.kernels.selected_logprob import from_logits, scaled
from headrace.policy.config import PolicyConfig

PADS = (4, 8, 16, 32)
_COUNTS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 100)
_MANY = 500
_WIDEST = 4096


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """How the model computes here."""

    exact: bool
    """A position's bits are the same in sampler and trainer, whatever the batch."""
    row_pad: int
    """Rows of every product are padded to a multiple of this; 1 in ordinary mode."""
    reason: str
    """Why exact mode is off; empty when it is on."""
    fingerprint: str


def probe(config: PolicyConfig, *, exact: bool = True, seed: int = 0) -> Numerics:
    """Find the row padding for this model on this machine, with the torch threads now set. Under a second.

    exact=False asks for ordinary arithmetic. Where exact mode does not hold the result says so and why: whoever was
    asked for exact mode must then refuse.
    """
    reason = "" if exact else "not asked for"
    pad = 1
    if exact:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            pad, reason = _smallest_pad(config, generator)
            reason = reason or _elementwise(config, generator)
    kept = pad if not reason else 1
    plain = Numerics(exact=not reason, row_pad=kept, reason=reason, fingerprint="")
    return msgspec.structs.replace(plain, fingerprint=_fingerprint(config, plain))


def _draw(generator: torch.Generator, config: PolicyConfig, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(config.torch_dtype)


def _products(config: PolicyConfig) -> list[tuple[int, int]]:
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
    return sorted({(k, min(n, _WIDEST)) for k, n in shapes})


def _smallest_pad(config: PolicyConfig, generator: torch.Generator) -> tuple[int, str]:
    """(pad, "") or (1, what failed with the largest)."""
    operands = [
        (_draw(generator, config, _MANY, k), _draw(generator, config, n, k) * k**-0.5) for k, n in _products(config)
    ]
    if config.scores == "sigmoid":  # the router's product is float32 there
        operands.append(
            (
                torch.randn(_MANY, config.dim, generator=generator),
                torch.randn(config.experts, config.dim, generator=generator),
            )
        )
    reason = ""
    for pad in PADS:
        moved = next(_moved(operands, pad), "")
        reason = f"rows of a matrix product depend on their number even when padded to {pad} ({moved})" if moved else ""
        reason = reason or _attention(config, pad, generator) or _experts(config, pad, generator)
        if not reason:
            return pad, ""
    return 1, reason


def _moved(operands: list[tuple[Tensor, Tensor]], pad: int) -> Iterator[str]:
    """What went wrong with this padding, one text per failure."""
    for x, weight in operands:
        many = batch_invariant.linear(x, weight, pad)
        for count in _COUNTS:
            for at in (0, pad, 3 * pad + 1):
                if not torch.equal(batch_invariant.linear(x[at : at + count], weight, pad), many[at : at + count]):
                    yield f"{count} rows, {weight.shape[1]} to {weight.shape[0]}"


def _elementwise(config: PolicyConfig, generator: torch.Generator) -> str:
    """Norms, activation, softmax and friends: a row alone against the row in company. The reason, or nothing."""
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


def _attention(config: PolicyConfig, pad: int, generator: torch.Generator) -> str:
    """Full sequences against one query, a few, and a batch over a cache. The reason, or nothing."""
    c = config
    lengths = [2 * BLOCK + 6, 40]
    total = sum(lengths)
    q = _draw(generator, c, total, c.heads, c.head_dim)
    k, v = (_draw(generator, c, total, c.kv_heads, c.head_dim) for _ in range(2))
    full = block_attention.packed_attention(q, k, v, Packing(lengths), c.head_dim**-0.5)
    blocks = [-(-length // BLOCK) for length in lengths]

    def pooled(x: Tensor) -> Tensor:
        pool = x.new_zeros(sum(blocks) * BLOCK, *x.shape[1:])
        pool[: lengths[0]], pool[blocks[0] * BLOCK : blocks[0] * BLOCK + lengths[1]] = torch.split(x, lengths)
        return pool.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2).contiguous()

    keys, values = pooled(k), pooled(v)
    table = torch.tensor([list(range(blocks[0])), [blocks[0]] + [0] * (blocks[0] - 1)])
    first, second = torch.split(full, lengths)
    group = c.heads // c.kv_heads
    for steps in (1, 2, 5, 33):
        at = torch.tensor([[lengths[0] - steps], [lengths[1] - steps]]) + torch.arange(steps)
        query = torch.stack((q[at[0]], q[at[1] + lengths[0]]))
        pages = block_attention.paging(table, at, group, pad)
        got = block_attention.cached_attention(query, keys, values, pages, c.head_dim**-0.5)
        if not (torch.equal(got[0], first[at[0]]) and torch.equal(got[1], second[at[1]])):
            return f"attention of {steps} new tokens over a cache differs from attention over the whole sequence"
        pages = block_attention.paging(table[1:, :1], at[1:], group, pad)
        alone = block_attention.cached_attention(query[1:], keys, values, pages, c.head_dim**-0.5)
        if not torch.equal(alone[0], second[at[1]]):
            return f"attention of {steps} new tokens differs alone and in a batch"
    return ""


def _experts(config: PolicyConfig, pad: int, generator: torch.Generator) -> str:
    """Tokens through their experts alone and in company. The reason, or nothing."""
    c = config
    if not c.experts:
        return ""
    x, scores = _draw(generator, c, _MANY, c.dim), torch.randn(_MANY, c.experts, generator=generator)
    gate_up = _draw(generator, c, c.experts, 2 * c.expert_dim, c.dim) * c.dim**-0.5
    down = _draw(generator, c, c.experts, c.dim, c.expert_dim) * c.expert_dim**-0.5
    rule = Rule(c.scores == "sigmoid", c.expert_groups, c.kept_groups, c.gate_scale)
    gates, experts = route(scores, c.top_k, c.normalise_top_k, None, rule)
    options = {"cast": mxfp8.rounded} if c.expert_format == "mxfp8" else {}
    many = expert_mlp.expert_mlp(x, gates, experts, gate_up, down, pad, **options)
    for count in _COUNTS:
        few = expert_mlp.expert_mlp(x[:count], gates[:count], experts[:count], gate_up, down, pad, **options)
        if not torch.equal(few, many[:count]):
            return f"experts of {count} tokens differ from the same tokens among {_MANY}"
    return ""


def _fingerprint(config: PolicyConfig, numerics: Numerics) -> str:
    """Readable head and 16 hex digits over the bits of a small forward."""
    from headrace.policy.model import Model  # the model needs `Numerics`: a circle at import, not in use

    layers = config.dense_layers + 1 if config.experts else 1
    small = msgspec.structs.replace(config, layers=layers, vocab=min(config.vocab, _WIDEST))
    with torch.no_grad():
        model = Model(small, numerics, seed=1)
        lengths = (37, 70, 1)
        ids = torch.arange(sum(lengths)) * 7 % small.vocab
        logp, entropy = model.selected_logprobs(model(ids, lengths), ids.flip(0), 0.9)
    isa = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    torch_version = torch.__version__.split("+")[0]
    mode = f"exact{numerics.row_pad}" if numerics.exact else "ordinary"
    digest = hashlib.sha256(f"{isa} {torch_version} {mode} {config.described}".encode())
    digest.update(torch.cat((logp, entropy)).numpy().tobytes())
    return f"cpu-{isa}-torch{torch_version}-{mode}-{digest.hexdigest()[:16]}"
