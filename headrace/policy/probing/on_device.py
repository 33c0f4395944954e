"""The checks of exact mode on a GPU: the operators that a model calls, on few rows and on many.

The operands are those of the CPU's probe, drawn there and moved. No padding is searched: the Triton kernels add in one
order for every number of rows (`kernels/tile.py`). Tiles depend on the number of rows, so operands of products are
repeated until the largest tiles are taken. Rotary embedding and SwiGLU, which are Triton kernels too, and rows of the
embedding, which torch copies, are checked beside them.
"""

import itertools
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import batch_invariant, dispatch, grouped_mm, operators
from headrace.kernels.block_attention import BLOCK, Packing
from headrace.kernels.heights import cancelling
from headrace.kernels.route import Rule
from headrace.policy import attention
from headrace.policy.cache import KVCache, Step
from headrace.policy.config import PolicyConfig
from headrace.policy.probing import operands
from headrace.policy.probing.operands import COUNTS, MANY, WIDEST, AttentionOperands, ExpertOperands

NEW = (1, 2, 5, 33)
"""Numbers of new tokens over a cache."""
EXPERTS = 16
"""Experts of the probe's mixture: more would only take more time to draw."""


def narrowed(config: PolicyConfig) -> PolicyConfig:
    """The policy with at most EXPERTS experts, unless they are in groups."""
    experts = min(config.experts, max(EXPERTS, config.top_k))
    return config if config.expert_groups > 1 else msgspec.structs.replace(config, experts=experts)


def failure(config: PolicyConfig, generator: torch.Generator, device: torch.device) -> str:
    """The first operator whose rows depend on the batch; empty where exact mode holds."""
    config = narrowed(config)
    checks = itertools.chain(_products(config, generator, device), _rows(config, generator, device))
    for name, operand, function in checks:
        if count := _differs(operand, function):
            return f"{name} of {count} rows differs from the same rows among {len(operand)}"
    for case in operands.attention_operands(config, generator):
        if reason := _attention(config, case, device):
            return reason
    return _experts(config, generator, device)


_Check = tuple[str, Tensor, Callable[[Tensor, slice], Tensor]]
"""A name, an operand, and the result of some of its rows; the slice says which."""


def _differs(operand: Tensor, function: Callable[[Tensor, slice], Tensor]) -> int:
    """The first number of rows with other bits than the same rows have among all; 0 where there is none."""
    every = function(operand, slice(None))
    for count in COUNTS:
        for at in (0, 7):
            part = slice(at, at + count)
            if not torch.equal(function(operand[part].clone(), part), every[part]):
                return count
    return 0


def _products(config: PolicyConfig, generator: torch.Generator, device: torch.device) -> Iterator[_Check]:
    """Every product of the model, by operands that cancel."""
    shapes = [(config.torch_dtype, min(n, WIDEST), k) for k, n in operands.products(config)]
    if config.scores == "sigmoid":  # the router's product is float32 there
        shapes.append((torch.float32, config.experts, config.dim))
    for dtype, n, k in shapes:
        x, weight = (part.to(device) for part in cancelling(generator, dtype, MANY, (n, k)))
        x = x.repeat(dispatch.tiles(batch_invariant.LARGEST_ROWS, MANY), 1)

        def product(rows: Tensor, _: slice, weight: Tensor = weight) -> Tensor:
            return operators.linear(rows, weight, True)

        yield f"a product from {k} to {n}", x, product


def _rows(config: PolicyConfig, generator: torch.Generator, device: torch.device) -> Iterator[_Check]:
    """Norms, activation, rotation, embedding, routes and log-probabilities."""
    c = config

    def new(*shape: int) -> Tensor:
        return operands.drawn(generator, c, *shape).to(device)

    heads, vocabulary = new(MANY, c.heads, c.head_dim), min(c.vocab, WIDEST)
    for name, x in (("rms_norm", new(MANY, c.dim)), ("head norm", heads)):
        weight = new(*x.shape[1:])

        def norm(rows: Tensor, _: slice, weight: Tensor = weight) -> Tensor:
            return operators.rms_norm(rows, weight, c.eps)

        yield name, x, norm
    yield "swiglu", new(MANY, 2 * c.expert_dim) * 3, lambda rows, _: operators.swiglu(rows)
    cos, sin = attention.Rotary(c.turned, c.rope_theta, c.torch_dtype, c.rope)(torch.arange(MANY, device=device), MANY)
    yield "rotation", heads, lambda rows, part: operators.rotate(rows, cos[part], sin[part])
    ids = torch.randint(0, vocabulary, (MANY,), generator=generator).to(device)
    table, head = new(vocabulary, c.dim), new(vocabulary, c.dim) * c.dim**-0.5
    yield "embedding", ids, lambda rows, _: F.embedding(rows, table)
    heat = torch.full((MANY,), 0.7).to(device)

    def selected(rows: Tensor, part: slice) -> Tensor:
        return torch.stack(operators.selected_logprob(rows, head, ids[part], heat[part], True), 1)

    yield "log-probability", new(MANY, c.dim), selected
    if c.experts:
        scores = torch.randn(MANY, c.experts, generator=generator).to(device)
        yield "gates", scores, lambda rows, _: torch.cat(_route(c, rows), 1)


def _route(config: PolicyConfig, scores: Tensor) -> tuple[Tensor, Tensor]:
    c = config
    rule = Rule(c.scores == "sigmoid", c.expert_groups, c.kept_groups, c.gate_scale)
    return operators.route(scores, c.top_k, c.normalise_top_k, None, rule)


def _attention(config: PolicyConfig, case: AttentionOperands, device: torch.device) -> str:
    """Two whole sequences against a cache that gets all but their last tokens first, together and alone."""
    lengths, scale = case.lengths, case.scale
    q, k, v = (x.to(device) for x in (case.q, case.k, case.v))
    whole = attention.packed(q, k, v, Packing(lengths, device), scale, True)
    blocks = [-(-length // BLOCK) for length in lengths]
    tables = [[*range(blocks[0])], [*range(blocks[0], sum(blocks))]]
    one = msgspec.structs.replace(config, layers=1)
    first = [0, lengths[0]]
    for steps in NEW:
        cache = KVCache(one, sum(blocks), device)
        starts = [length - steps for length in lengths]
        for counts, begins in ((starts, [0, 0]), ([steps, steps], starts)):
            rows = torch.cat(
                [torch.arange(at + b, at + b + n) for at, b, n in zip(first, begins, counts, strict=True)]
            ).to(device)
            step = Step(counts, begins, tables, cache)
            got = attention.cached(q[rows], k[rows], v[rows], step, cache, 0, scale, True)
            if not torch.equal(got, whole[rows]):
                return f"attention of {max(counts)} new tokens over a cache differs from attention over the sequence"
        alone = Step([steps], starts[1:], tables[1:], cache)
        last = rows[steps:]
        if not torch.equal(attention.cached(q[last], k[last], v[last], alone, cache, 0, scale, True), whole[last]):
            return f"attention of {steps} new tokens differs alone and in a batch"
    return ""


def _experts(config: PolicyConfig, generator: torch.Generator, device: torch.device) -> str:
    """Tokens through their experts, few and many at once."""
    cases = operands.expert_operands(config, generator)
    return next(filter(None, (_experts_differ(config, case, device) for case in cases)), "")


def _experts_differ(config: PolicyConfig, case: ExpertOperands, device: torch.device) -> str:
    x, scores, gate_up, down = (t.to(device) for t in (case.x, case.scores, case.gate_up, case.down))
    copies = dispatch.tiles(grouped_mm.MANY_ROWS * config.experts, MANY * config.top_k)
    x, scores = x.repeat(copies, 1), scores.repeat(copies, 1)
    gates, chosen = _route(config, scores)

    def through(rows: Tensor, part: slice) -> Tensor:
        return operators.experts(rows, gates[part], chosen[part], gate_up, down, True, grid=case.grid)

    count = _differs(x, through)
    return f"experts of {count} tokens differ from the same tokens among {len(x)}" if count else ""
