"""Batch-invariant attention on a GPU: prefill and decode give the same bits, for any batch and any split of the work.

Idea: FlashAttention (arXiv 2307.08691) loops over keys with a running maximum and sum. Decode has too few queries to
fill a GPU, so its keys are split among programs. Libraries choose the number of splits by batch and length, so the
order of the sum, and with it the bits, depend on the batch. Here splits are fixed by position: keys 0 to 2047, 2048 to
4,095 and so on ("fixed split-KV size", He et al., "Defeating Nondeterminism in LLM Inference", 2025). Each split starts
from an empty state and takes blocks of 64 keys in ascending order; splits are merged in ascending order. Prefill
computes all splits of a tile in one program, decode one split per program with a second kernel that merges. Both run
`_walk` and `_merge`, so the bits are the same. A masked key, block or split changes no bit: its factor is 1, its
summand 0.

Layout: the G query heads of a key-value head are rows (token t, head g is row t G + g), in tiles of 128 rows for whole
sequences and for many new tokens, and 64 in decode: four warps hold 64 rows either way, with the same instructions (see
`tile`). A tile of fewer rows would compile to an instruction that sums in another order. Blocks of keys that all rows
of a tile see need no mask. Keys and values are contiguous [N, V, D], or paged [blocks, V, 64, D] with a table of block
numbers: only addresses differ. `tiles` int32 [., 5]: first token of the sequence's queries, first row of the tile, rows
of the sequence, position of its first query, and where its keys are (first token, or first entry of the table).

Trade-off: a tile of 64 rows in decode is mostly padding. Decode is bound by memory traffic all the same: 64 keys of
D = 128 are 32 KiB and 2.1 MFLOP, which at full bandwidth is a third of an H200's bfloat16 rate. Contraction to fused
multiply-adds is switched off, because the compiler could contract the two programs differently.

Twin: `block_attention`, which has no splits and takes powers of e where this takes powers of 2.
Error against float64 of the same inputs: 1e-2 of the largest |v| in bfloat16, 1e-5 in float32.
`operators` calls it for tensors on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.block_attention import BLOCK
from headrace.kernels.dispatch import jit, tl

SPLIT = 2048
"""Keys of a split: a multiple of a block, never a function of batch or length."""
KEYS = 64
"""Keys of a step."""
MANY, FEW, SINGLE = (128, 8, 3), (64, 4, 3), (64, 8, 2)
"""Rows of a tile, warps of a program and stages of its loop: of whole sequences, of new tokens, and in float32."""
PROGRAMS = 256
"""Whole tiles are used over a cache where there are so many programs, which fill a GPU without a split of the keys."""


@jit
def _places(table, base, key, head, heads, PAGED: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where keys [BK] of a head are, in rows of D numbers."""
    if PAGED:
        block = tl.load(table + base + key // PAGE).to(tl.int64)
        place = (block * heads + head) * PAGE + key % PAGE
    else:
        place = (base + key).to(tl.int64) * heads + head
    return place


@jit
def _online(s, vs, peak, total, out):  # type: ignore[no-untyped-def]
    """The state after more keys. s [BM, BK]: scores in powers of two; a masked one is -inf and changes no bit."""
    top = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet
    p = tl.exp2(s - safe[:, None])
    fade = tl.exp2(peak - safe)
    total = total * fade + tl.sum(p, 1)
    out = out * fade[:, None]
    return top, total, tl.dot(p.to(vs.dtype), vs, out, input_precision="ieee")


@jit
def _walk(  # type: ignore[no-untyped-def]
    x, k, v, table, base, head, heads, d, first, last, limit, low, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, FULL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Keys first to last - 1 for the rows x [BM, BD]: maximum, sum and weighted values, from an empty state.

    limit [BM]: last key that each row sees; low: the lowest of them. Blocks of keys that all rows see need no mask.
    FULL: BD is d. scale: of the scores, in powers of two.
    """
    lane, near = tl.arange(0, BD), tl.arange(0, BK)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, BD), dtype=tl.float32)
    clear = tl.maximum(first, tl.minimum(last, low + 1) // BK * BK)
    for start in range(first, clear, BK):
        place = _places(table, base, start + near, head, heads, PAGED, PAGE)
        if FULL:
            ks, vs = tl.load(k + place[None, :] * d + lane[:, None]), tl.load(v + place[:, None] * d + lane[None, :])
        else:
            ks = tl.load(k + place[None, :] * d + lane[:, None], mask=(lane < d)[:, None], other=0.0)
            vs = tl.load(v + place[:, None] * d + lane[None, :], mask=(lane < d)[None, :], other=0.0)
        if WIDE:
            ks, vs = ks.to(tl.float32), vs.to(tl.float32)
        s = tl.dot(x, ks, input_precision="ieee") * scale
        peak, total, out = _online(s, vs, peak, total, out)
    for start in range(clear, last, BK):
        key = start + near
        inside = key < last
        place = _places(table, base, tl.minimum(key, last - 1), head, heads, PAGED, PAGE)
        ks = tl.load(k + place[None, :] * d + lane[:, None], mask=(lane < d)[:, None], other=0.0)
        vs = tl.load(v + place[:, None] * d + lane[None, :], mask=inside[:, None] & (lane < d)[None, :], other=0.0)
        if WIDE:
            ks, vs = ks.to(tl.float32), vs.to(tl.float32)
        s = tl.dot(x, ks, input_precision="ieee") * scale
        s = tl.where((key[None, :] <= limit[:, None]) & inside[None, :], s, float("-inf"))
        peak, total, out = _online(s, vs, peak, total, out)
    return peak, total, out


@jit
def _merge(peak, total, out, next_peak, next_total, next_out):  # type: ignore[no-untyped-def]
    """Merge the state so far with the next split. A split without a visible key changes no bit."""
    top = tl.maximum(peak, next_peak)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(peak - safe), tl.exp2(next_peak - safe)
    return top, total * old + next_total * new, out * old[:, None] + next_out * new[:, None]


@jit
def _rows_of(tiles, at, group, heads, head, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile: (indices of its rows in [tokens, V, G], which of them exist, last key that each sees, that of the first
    row, end of the tile's keys, where its sequence's keys are)."""
    token, first, rows = tl.load(tiles + at), tl.load(tiles + at + 1), tl.load(tiles + at + 2)
    start, base = tl.load(tiles + at + 3), tl.load(tiles + at + 4)
    row = first + tl.arange(0, BM)
    place = ((token + row // group).to(tl.int64) * heads + head) * group + row % group
    last = start + (tl.minimum(first + BM, rows) - 1) // group + 1
    return place, row < rows, start + row // group, start + first // group, last, base


@jit
def _whole_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, tiles, table, heads, group, d, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    FULL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile, all splits of its keys in one program."""
    head, lane = tl.program_id(1), tl.arange(0, BD)
    place, live, limit, low, last, base = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
    mask = live[:, None] & (lane < d)[None, :]
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    mixed = tl.zeros((BM, BD), dtype=tl.float32)
    for first in range(0, last, SPLIT):
        a, b, c = _walk(
            x, k, v, table, base, head, heads, d, first, tl.minimum(first + SPLIT, last), limit, low,
            scale * 1.4426950408889634, PAGED, BM, BD, BK, PAGE, FULL, WIDE,
        )  # fmt: skip
        peak, total, mixed = _merge(peak, total, mixed, a, b, c)
    tl.store(out + place[:, None] * d + lane[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + place, peak * 0.6931471805599453 + tl.log(total), mask=live)


@jit
def _split_kernel(  # type: ignore[no-untyped-def]
    q, k, v, peaks, totals, mixes, tiles, table, heads, group, d, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    FULL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile, one split: its maximum, sum and weighted values into scratch [tiles, V, splits, BM (, BD)]."""
    head, lane, split = tl.program_id(1), tl.arange(0, BD), tl.program_id(2)
    place, live, limit, low, last, base = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=live[:, None] & (lane < d)[None, :], other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    first = split * SPLIT
    a, b, c = _walk(
        x, k, v, table, base, head, heads, d, first, tl.minimum(first + SPLIT, last), limit, low,
        scale * 1.4426950408889634, PAGED, BM, BD, BK, PAGE, FULL, WIDE,
    )  # fmt: skip
    at = ((tl.program_id(0).to(tl.int64) * heads + head) * tl.num_programs(2) + split) * BM + tl.arange(0, BM)
    tl.store(peaks + at, a)
    tl.store(totals + at, b)
    tl.store(mixes + at[:, None] * BD + lane[None, :], c)


@jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    peaks, totals, mixes, out, lse, tiles, heads, group, d, splits, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One tile: its splits in ascending order."""
    head, lane = tl.program_id(1), tl.arange(0, BD)
    place, live, _, _, _, _ = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    mixed = tl.zeros((BM, BD), dtype=tl.float32)
    for split in range(0, splits):
        at = ((tl.program_id(0).to(tl.int64) * heads + head) * splits + split) * BM + tl.arange(0, BM)
        a, b = tl.load(peaks + at), tl.load(totals + at)
        c = tl.load(mixes + at[:, None] * BD + lane[None, :])
        peak, total, mixed = _merge(peak, total, mixed, a, b, c)
    mask = live[:, None] & (lane < d)[None, :]
    tl.store(out + place[:, None] * d + lane[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + place, peak * 0.6931471805599453 + tl.log(total), mask=live)


Queries = tuple[int, int, int, int]
"""Queries of a sequence: first token, number of tokens, position of the first, where the sequence's keys are."""


@functools.lru_cache(maxsize=32)
def tiles(queries: tuple[Queries, ...], group: int, height: int, device: torch.device) -> Tensor:
    """The tiles int32 [., 5] of `height` rows. Kept for the other layers, because the device waits for the copy."""
    rows = [
        (token, first, count * group, start, base)
        for token, count, start, base in queries
        for first in range(0, count * group, height)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 5)


def _few(rows: Sequence[int], heads: int) -> bool:
    """Whether whole tiles of these sequences would be mostly padding, or too few to fill a GPU."""
    count = sum(dispatch.tiles(each, MANY[0]) for each in rows)
    return count * heads < PROGRAMS or 2 * sum(rows) < count * MANY[0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, queries: tuple[Queries, ...], scale: float,
    split: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [tokens, H, D] -> (out like q, log-sum-exp float32 [tokens, H]). split: None chooses what is faster."""
    heads, d = k.shape[1], q.shape[2]
    group = q.shape[1] // heads
    if split is None:
        split = _few([count * group for _, count, _, _ in queries], heads)
    single = q.dtype == torch.float32
    height, warps, stages = SINGLE if single else FEW if split else MANY
    work = tiles(queries, group, height, q.device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not len(work):
        return out, lse
    sizes: dict[str, Any] = {"BM": height, "BD": max(16, dispatch.power_of_two(d))}
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    walk = {
        "PAGED": table is not None, "BK": KEYS, "PAGE": BLOCK, "SPLIT": SPLIT, "FULL": sizes["BD"] == d,
        "WIDE": dispatch.INTERPRETED, "num_stages": stages,
    }  # fmt: skip
    pages = work if table is None else table
    if not split:
        _whole_kernel[(len(work), heads)](
            q, k, v, out, lse, work, pages, heads, group, d, scale, **sizes, **options, **walk
        )
        return out, lse
    splits = dispatch.tiles(max(count + start for _, count, start, _ in queries), SPLIT)
    shape = (len(work), heads, splits, height)
    peaks, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    mixes = torch.empty(*shape, sizes["BD"], dtype=torch.float32, device=q.device)
    _split_kernel[(len(work), heads, splits)](
        q, k, v, peaks, totals, mixes, work, pages, heads, group, d, scale, **sizes, **options, **walk
    )
    _merge_kernel[(len(work), heads)](peaks, totals, mixes, out, lse, work, heads, group, d, splits, **sizes, **options)
    return out, lse


def packed_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, split: bool = False
) -> tuple[Tensor, Tensor]:
    """Causal attention within packed sequences: q [N, H, D], k and v [N, V, D] -> (out [N, H, D], log-sum-exp [N, H]).

    lengths: tokens of each sequence; they add up to N. split: run one program per split of the keys, with the same
    bits. The output has q's dtype, the log-sum-exp is float32.
    """
    starts = [0, *itertools.accumulate(lengths)][: len(lengths)]
    queries = tuple((start, length, 0, start) for start, length in zip(starts, lengths, strict=True))
    return _attend(q.contiguous(), k.contiguous(), v.contiguous(), None, queries, scale, split)


def cached_attention_triton(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Sequence[int], scale: float, *,
    split: bool | None = None,
) -> Tensor:  # fmt: skip
    """`ragged_attention_triton` where every sequence brings T new tokens: q [B, T, H, D] -> [B, T, H, D]."""
    lengths = [q.shape[1]] * q.shape[0]
    return ragged_attention_triton(q.flatten(0, 1), keys, values, table, lengths, starts, scale, split=split).view_as(q)


def ragged_attention_triton(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], scale: float,
    *, split: bool | None = None,
) -> Tensor:  # fmt: skip
    """Twin of `block_attention.ragged_attention`: q [N, H, D] of new tokens over a paged cache that holds theirs.

    lengths: new tokens of each sequence, sum N; starts: position of its first. keys and values [blocks, V, 64, D];
    table int [B, n] of block numbers, any valid one where a sequence has fewer. Returns [N, H, D]. split: run a program
    for each split of the keys, with the same bits; None decides by the number of rows.
    """
    pages = table.to(torch.int32).contiguous()
    places, token = [], 0
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        places.append((token, length, start, row * pages.shape[1]))
        token += length
    return _attend(q.contiguous(), keys.contiguous(), values.contiguous(), pages, tuple(places), scale, split)[0]
