"""The probe of exact mode: tests whether a row has the same bits on this machine for every batch.

Idea: exact mode needs properties of the CPU and its libraries that no documentation guarantees. So the probe searches
the numbers of rows at which each product of the model agrees (`kernels.heights`), runs the functions of the model, in
the model's own shapes, on few rows and on many, and compares bits. It refuses exact mode where one differs, and names
it.

The operands cancel, so that another order of the sums shows. On a GPU the model's operators are probed instead
(`probing.on_device`), and no heights are searched.

The fingerprint names the arithmetic: a hash over the products that were searched, a small forward of the model's
widths, the torch version and the instruction set. Two processes with one fingerprint compute the same bits; with
different ones (another CPU, say) expect differences of one rounding.
"""

import hashlib
import re
from collections.abc import Callable
from importlib import metadata

import msgspec
import torch
from torch import Tensor

from headrace.kernels import batch_invariant, block_attention, expert_mlp, heights, operators
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
    attention_operands,
    drawn,
    expert_operands,
    products,
)

Product = tuple[heights.Product, int, int, torch.dtype]
"""A kind of product, K, N and dtype."""


def probe(config: PolicyConfig, *, exact: bool = True, seed: int = 0, device: torch.device | str = "cpu") -> Numerics:
    """Whether exact mode holds for this model on this machine, with the torch threads now set. A second or two.

    exact=False asks for ordinary arithmetic. Where exact mode does not hold, the result has exact=False and the reason;
    a caller that was asked for exact mode must then refuse to run. device: where the model computes.
    """
    where = torch.device(device)
    if config.source:
        return _of_library(config, where)
    reason = "" if exact else "not asked for"
    with torch.no_grad(), selected(where):
        if exact:
            generator = torch.Generator().manual_seed(seed)
            on_cpu = where.type == "cpu"
            reason = _failure(config, generator) if on_cpu else on_device.failure(config, generator, where)
        numerics = Numerics(exact=not reason, reason=reason, fingerprint="")
        return msgspec.structs.replace(numerics, fingerprint=_fingerprint(config, numerics, where))


def _failure(config: PolicyConfig, generator: torch.Generator) -> str:
    """The first function whose rows depend on the batch, on a CPU; empty where exact mode holds."""
    try:
        for product in _products(config):
            heights.agreeing(*product)
        return _attention(config, generator) or _elementwise(config, generator) or _experts(config, generator)
    except heights.RowsDiffer as error:
        return str(error)


def _products(config: PolicyConfig) -> list[Product]:
    """Every product of the model."""
    c, dtype = config, config.torch_dtype
    kinds: list[Product] = [(heights.linear, k, n, dtype) for k, n in products(c)]
    if c.scores == "sigmoid":  # the router's product is float32 there
        kinds.append((heights.linear, c.dim, c.experts, torch.float32))
    return [*kinds, (heights.scores, c.head_dim, BLOCK, dtype), (heights.shares, BLOCK, c.head_dim, dtype)]


def _elementwise(config: PolicyConfig, generator: torch.Generator) -> str:
    """Norms, activation, softmax and others: a row alone against the same row in a batch. The reason, or nothing."""
    c = config
    x = drawn(generator, c, MANY, c.dim)
    gate_up = drawn(generator, c, MANY, 2 * c.expert_dim) * 3
    logits = drawn(generator, c, 20, c.vocab) * 4
    targets = torch.randint(0, c.vocab, (20,), generator=generator)
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
                return f"{name} of {count} rows differs from the same rows among {len(operand)}"
    return ""


def _attention(config: PolicyConfig, generator: torch.Generator) -> str:
    """Full sequences against one query, a few, and a batch over a cache. The reason, or nothing."""
    return next(filter(None, (_attention_differs(config, case) for case in attention_operands(config, generator))), "")


def _attention_differs(config: PolicyConfig, case: AttentionOperands) -> str:
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
    for steps in (1, 2, 5, 33):
        at = torch.tensor([[lengths[0] - steps], [lengths[1] - steps]]) + torch.arange(steps)
        query = torch.stack((q[at[0]], q[at[1] + lengths[0]]))
        pages = block_attention.paging(table, at, group, q)
        got = block_attention.cached_attention(query, keys, values, pages, scale)
        if not (torch.equal(got[0], first[at[0]]) and torch.equal(got[1], second[at[1]])):
            return f"attention of {steps} new tokens over a cache differs from attention over the whole sequence"
        pages = block_attention.paging(table[1:, :1], at[1:], group, q)
        alone = block_attention.cached_attention(query[1:], keys, values, pages, scale)
        if not torch.equal(alone[0], second[at[1]]):
            return f"attention of {steps} new tokens differs alone and in a batch"
    return ""


def _experts(config: PolicyConfig, generator: torch.Generator) -> str:
    """Tokens through their experts, few and many at once. The reason, or nothing."""
    c = config
    rule = Rule(c.scores == "sigmoid", c.expert_groups, c.kept_groups, c.gate_scale)
    for x, scores, gate_up, down, grid in expert_operands(config, generator):
        cast = operators.cast(grid)
        gates, experts = route(scores, c.top_k, c.normalise_top_k, None, rule)
        many = expert_mlp.expert_mlp(x, gates, experts, gate_up, down, True, cast)
        for count in COUNTS:
            few = expert_mlp.expert_mlp(x[:count], gates[:count], experts[:count], gate_up, down, True, cast)
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
    mode = "exact" if numerics.exact else "ordinary"
    if device.type != "cpu" and not numerics.exact:
        mode = "+".join((mode, *_library(config, device)))
    chip, versions = _chip(device), torch.__version__.split("+")[0]
    if device.type != "cpu":
        versions = f"{versions}-triton{_triton()}"
    digest = hashlib.sha256(f"{chip} {versions} {mode} {config.described}".encode())
    if device.type == "cpu" and numerics.exact:
        for product in _products(config):
            digest.update(heights.agreeing(*product).digest)
    digest.update(torch.cat((logp, entropy)).cpu().numpy().tobytes())
    return f"{device.type}-{chip}-torch{versions}-{mode}-{digest.hexdigest()[:16]}"


def _of_library(config: PolicyConfig, device: torch.device) -> Numerics:
    """Ordinary mode: nobody promises bits of transformers' modules."""
    versions = f"torch{torch.__version__.split('+')[0]}-transformers{metadata.version('transformers')}"
    digest = hashlib.sha256(config.described.encode()).hexdigest()[:16]
    fingerprint = f"{device.type}-{_chip(device)}-{versions}-ordinary-{digest}"
    return Numerics(exact=False, reason="the provider transformers has none", fingerprint=fingerprint)


def _library(config: PolicyConfig, device: torch.device) -> list[str]:
    """The kernels of PyTorch that training takes there in ordinary mode."""
    widths = (config.dim, config.expert_dim) if config.experts else ()
    return library.taken(device, config.torch_dtype, config.head_dim, widths)


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
