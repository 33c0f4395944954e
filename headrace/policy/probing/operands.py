"""Operands of the probe of exact mode, drawn on the CPU, in a model's own shapes.

They cancel: see `kernels.heights`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.block_attention import BLOCK
from headrace.kernels.heights import cancelling, pairs
from headrace.policy.adapters import shape
from headrace.policy.config import PolicyConfig

COUNTS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 100)
"""Numbers of rows that are computed alone."""
MANY = 500
"""Rows that are computed at once."""
WIDEST = 4096
"""Ids of a vocabulary that are probed: more would take too long."""


def drawn(generator: torch.Generator, config: PolicyConfig, *shape: int) -> Tensor:
    """Ordinary operands in the model's dtype."""
    return torch.randn(*shape, generator=generator).to(config.torch_dtype)


def products(config: PolicyConfig) -> list[tuple[int, int]]:
    """(K, N) of every product of the model."""
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
    return sorted(set(shapes))


class AttentionOperands(NamedTuple):
    """Packed sequences of `lengths`: q [N, H, D], k and v [N, V, D]."""

    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def attention_operands(config: PolicyConfig, generator: torch.Generator) -> list[AttentionOperands]:
    """Ordinary operands with ragged lengths; scores that cancel; weighted values that cancel."""
    c = config
    ragged, whole = [2 * BLOCK + 6, 40], [3 * BLOCK, BLOCK]

    def packed(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (drawn(generator, c, sum(lengths), heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads))
        return q, k, v

    plain = AttentionOperands(ragged, *packed(ragged), c.head_dim**-0.5)
    q, k, v = packed(whole)
    index, sign = pairs(generator, c.head_dim)
    q, k = q[..., index], k[..., index] * sign.to(k.dtype)
    # The scores are rounding errors of about 1e-7: the scale makes them as large as ordinary ones.
    spread = float((q[:BLOCK, 0] @ k[:BLOCK, 0].T).float().std())
    scores = AttentionOperands(whole, q, k, v, 1.0 / spread if spread > 0 else c.head_dim**-0.5)
    q, k, v = packed(whole)
    index, sign = pairs(generator, BLOCK)
    # Pairs of keys within a block are equal, their values opposite: a query that sees whole blocks adds up to 0.
    at = (torch.arange(0, sum(whole), BLOCK)[:, None] + index).view(-1)
    sign = sign.repeat(sum(whole) // BLOCK)[:, None, None].to(v.dtype)
    values = AttentionOperands(whole, q, k[at], v[at] * sign, c.head_dim**-0.5)
    return [plain, scores, values]


class ExpertOperands(NamedTuple):
    """x [N, D] with router scores [N, E]; gate_up [E, 2I, D], down [E, D, I]."""

    x: Tensor
    scores: Tensor
    gate_up: Tensor
    down: Tensor
    grid: str
    """The number format to which inputs of products are rounded; empty: none."""


def expert_operands(config: PolicyConfig, generator: torch.Generator) -> list[ExpertOperands]:
    """Ordinary operands in the experts' number format; then a first and a second product that cancel.

    The products are the same functions with and without a cast, which works row by row: the cancelling operands go
    without, because rounding to a format would spoil their pairs.
    """
    c = config
    if not c.experts:
        return []
    up, low = (c.experts, 2 * c.expert_dim, c.dim), (c.experts, c.dim, c.expert_dim)
    scores = torch.randn(MANY, c.experts, generator=generator)
    x, gate_up, down = drawn(generator, c, MANY, c.dim), drawn(generator, c, *up), drawn(generator, c, *low)
    gate_up, down = gate_up * c.dim**-0.5, down * c.expert_dim**-0.5
    cases = [ExpertOperands(x, scores, gate_up, down, c.expert_format)]
    twins, opposites = cancelling(generator, c.torch_dtype, MANY, up)
    cases.append(ExpertOperands(twins, scores, opposites, down, ""))
    index, sign = pairs(generator, c.expert_dim)
    paired = gate_up[:, torch.cat((index, index + c.expert_dim))]  # equal rows: equal inner activations
    opposites = down[..., index] * sign.to(down.dtype)
    cases.append(ExpertOperands(x, scores, paired, opposites, ""))
    return cases
