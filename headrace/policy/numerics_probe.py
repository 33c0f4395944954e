"""The probe of exact mode: tests whether a row has the same bits on this machine for every batch.

Idea: exact mode needs properties of the CPU and its libraries that no documentation guarantees. So the probe runs the
functions of the model, in the model's own shapes, on few rows and on many, and compares bits. It takes the smallest row
padding that passes; if none passes, it refuses exact mode and names the operation that failed.

The operands cancel (`probing.operands`), so that another order of the sums shows. On a GPU the model's operators are
probed instead (`probing.on_device`), and no padding is searched.

The fingerprint names the arithmetic: a hash over a small forward of the model's widths, the torch version, the
instruction set and the row padding. Two processes with one fingerprint compute the same bits; with different ones
(another CPU, say) expect differences of one rounding.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from importlib import metadata

import msgspec
import torch
from torch import Tensor

from headrace.kernels import batch_invariant, block_attention, expert_mlp, operators
from headrace.kernels.block_attention import BLOCK, Packing
from headrace.kernels.operators import library
from headrace.kernels.route import Rule, route, sigmoid
from headrace.kernels.selected_logprob import from_logits, scaled
from headrace.policy.adapters import low_rank
from headrace.policy.config import PolicyConfig
from headrace.policy.device import selected
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from headrace.policy.probing import on_device
from headrace.policy.probing.operands import (
    COUNTS,
    MANY,
    WIDEST,
    AttentionOperands,
    ExpertOperands,
    Operands,
    attention_operands,
    cancelling,
    drawn,
    expert_operands,
    products,
)

ISA, WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
"""oneDNN reads this variable at its first product of a process. On a Xeon with AMX its tiles add a row in an order that
depends on the number of rows, whatever the padding (1,536 to 576 in bfloat16, torch 2.11); without them a padding of 4
suffices, at a tenth of the speed of large products. Other processors compute the same with and without it."""
PADS = (4, 8, 16, 32)
"""Row paddings that are tried, the smallest first."""


def probe(config: PolicyConfig, *, exact: bool = True, seed: int = 0, device: torch.device | str = "cpu") -> Numerics:
    """Find the row padding for this model on this machine, with the torch threads now set. Under a second.

    exact=False asks for ordinary arithmetic. Where exact mode does not hold, the result has exact=False and the reason;
    a caller that was asked for exact mode must then refuse to run. device: where the model computes. The kernels of a
    GPU need no padding; the smallest one stands for exact mode there. For 16 bits on a CPU the probe sets `ISA` for
    this process and its children, unless it is set. Where torch has multiplied before, that is too late on a CPU with
    AMX: exact mode is refused, and the reason says what to do.
    """
    where = torch.device(device)
    if config.source:
        return _of_library(config, where)
    reason = "" if exact else "not asked for"
    pad = 1
    with torch.no_grad(), selected(where):
        if exact:
            generator = torch.Generator().manual_seed(seed)
            if where.type == "cpu":
                limit_instructions(config)
                pad, reason = _smallest_pad(config, generator)
                reason = reason or _elementwise(config, generator)
            else:
                pad, reason = PADS[0], on_device.failure(config, generator, where, PADS[0])
        numerics = Numerics(exact=not reason, row_pad=pad if not reason else 1, reason=reason, fingerprint="")
        return msgspec.structs.replace(numerics, fingerprint=_fingerprint(config, numerics, where))


def limit_instructions(config: PolicyConfig) -> None:
    """Set `ISA` for this process where exact mode of the policy on a CPU needs it, before torch's first product."""
    if config.torch_dtype.itemsize == 2:
        os.environ.setdefault(ISA, WITHOUT_TILES)


def _smallest_pad(config: PolicyConfig, generator: torch.Generator) -> tuple[int, str]:
    """(pad, "") or (1, what failed with the largest)."""
    dtype = config.torch_dtype
    operands = [cancelling(generator, dtype, MANY, (n, k)) for k, n in products(config)]
    if config.scores == "sigmoid":  # the router's product is float32 there
        operands.append(cancelling(generator, torch.float32, MANY, (config.experts, config.dim)))
    attention, experts = attention_operands(config, generator), expert_operands(config, generator)
    reason = ""
    for pad in PADS:
        failure = next(_differing_products(operands, pad), "")
        reason = (
            f"rows of a matrix product depend on their number even when padded to {pad} ({failure}){_advice(dtype)}"
        )
        if not failure:
            reason = _attention(config, pad, attention) or _experts(config, pad, experts)
        if not reason:
            return pad, ""
    return 1, reason


def _advice(dtype: torch.dtype) -> str:
    """A remedy for products of 16 bits, to be read after the reason."""
    return f"; start the process with {ISA}={WITHOUT_TILES}, or use float32" if dtype.itemsize == 2 else ""


def _differing_products(operands: list[Operands], pad: int) -> Iterator[str]:
    """One text for each product whose rows differ with this padding."""
    for x, weight in operands:
        many = batch_invariant.linear(x, weight, pad)
        for count in COUNTS:
            for at in (0, pad, 3 * pad + 1):
                if not torch.equal(batch_invariant.linear(x[at : at + count], weight, pad), many[at : at + count]):
                    yield f"{count} rows, {weight.shape[1]} to {weight.shape[0]}"


def _elementwise(config: PolicyConfig, generator: torch.Generator) -> str:
    """Norms, activation, softmax and others: a row alone against the same row in a batch. The reason, or nothing."""
    c = config
    x = drawn(generator, c, MANY, c.dim)
    gate_up = drawn(generator, c, MANY, 2 * c.expert_dim) * 3
    logits = drawn(generator, c, MANY, min(c.vocab, WIDEST)) * 4
    targets = torch.randint(0, logits.shape[1], (MANY,), generator=generator)
    heads = drawn(generator, c, MANY, c.heads, c.head_dim)
    scores = torch.randn(MANY, max(c.experts, 2), generator=generator)
    positive = torch.rand(MANY, generator=generator) * 50 + 1
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
        for count in COUNTS:
            if not torch.equal(function(operand[:count]), many[:count]):
                return f"{name} of {count} rows differs from the same rows among {MANY}"
    return ""


def _attention(config: PolicyConfig, pad: int, operands: list[AttentionOperands]) -> str:
    """Full sequences against one query, a few, and a batch over a cache. The reason, or nothing."""
    return next(filter(None, (_attention_differs(config, pad, case) for case in operands)), "")


def _attention_differs(config: PolicyConfig, pad: int, case: AttentionOperands) -> str:
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


def _experts(config: PolicyConfig, pad: int, operands: list[ExpertOperands]) -> str:
    """Tokens through their experts, few and many at once. The reason, or nothing."""
    c = config
    rule = Rule(c.scores == "sigmoid", c.expert_groups, c.kept_groups, c.gate_scale)
    for x, scores, gate_up, down, grid in operands:
        cast = operators.cast(grid)
        gates, experts = route(scores, c.top_k, c.normalise_top_k, None, rule)
        many = expert_mlp.expert_mlp(x, gates, experts, gate_up, down, pad, cast)
        for count in COUNTS:
            few = expert_mlp.expert_mlp(x[:count], gates[:count], experts[:count], gate_up, down, pad, cast)
            if not torch.equal(few, many[:count]):
                return f"experts of {count} tokens differ from the same tokens among {MANY}"
    return ""


def _fingerprint(config: PolicyConfig, numerics: Numerics, device: torch.device) -> str:
    """Readable head and 16 hex digits over the bits of a small forward."""
    layers = config.dense_layers + 1 if config.experts else 1
    like = config if device.type == "cpu" else on_device.narrowed(config)
    small = msgspec.structs.replace(like, layers=layers, vocab=min(config.vocab, WIDEST))
    model = Model(small, numerics, seed=1)
    for name, parameter in model.named_parameters():
        if low_rank.is_adapter(name):  # zeros would hide the arithmetic of adapters
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    lengths = (37, 70, 1)
    ids = (torch.arange(sum(lengths)) * 7 % small.vocab).to(device)
    model.to(device)
    logp, entropy = model.selected_logprobs(model(ids, lengths), ids.flip(0), 0.9)
    mode = f"exact{numerics.row_pad}" if numerics.exact else "ordinary"
    if device.type == "cpu" and numerics.exact and config.torch_dtype.itemsize == 2:
        mode += f"over{batch_invariant.SMALL}"  # runs that were recorded without `least_rows` have other bits
    if device.type != "cpu" and not numerics.exact:
        mode = "+".join((mode, *_library(config, device)))
    chip, versions = _chip(device), torch.__version__.split("+")[0]
    if device.type != "cpu":
        versions = f"{versions}-triton{_triton()}"
    digest = hashlib.sha256(f"{chip} {versions} {mode} {config.described}".encode())
    digest.update(torch.cat((logp, entropy)).cpu().numpy().tobytes())
    return f"{device.type}-{chip}-torch{versions}-{mode}-{digest.hexdigest()[:16]}"


def _of_library(config: PolicyConfig, device: torch.device) -> Numerics:
    """Ordinary mode: nobody promises bits of transformers' modules."""
    versions = f"torch{torch.__version__.split('+')[0]}-transformers{metadata.version('transformers')}"
    digest = hashlib.sha256(config.described.encode()).hexdigest()[:16]
    fingerprint = f"{device.type}-{_chip(device)}-{versions}-ordinary-{digest}"
    return Numerics(exact=False, row_pad=1, reason="the provider transformers has none", fingerprint=fingerprint)


def _library(config: PolicyConfig, device: torch.device) -> list[str]:
    """The kernels of PyTorch that training takes there in ordinary mode."""
    widths = (config.dim, config.expert_dim) if config.experts and not config.gpt_oss else ()
    return library.taken(device, config.torch_dtype, config.head_dim, widths, config.gpt_oss)


def _chip(device: torch.device) -> str:
    """The instruction set of the CPU, or the name and the compute capability of a GPU."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(device).lower()).strip("_")
    return "{}-sm{}{}".format(name, *torch.cuda.get_device_capability(device))


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""
