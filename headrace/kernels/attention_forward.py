"""Batch-invariant attention on a GPU: prefill and decode give the same bits, for any batch and any split of the work.

Idea: FlashAttention (arXiv 2307.08691) loops over keys with a running maximum and sum. Decode has too few queries to
fill a GPU, so its keys are split among programs. Libraries choose the number of splits by batch and length, so the
order of the sum, and with it the bits, depend on the batch. Here splits are fixed by position: keys 0 to 511, 512 to
1,023 and so on ("fixed split-KV size", He et al., "Defeating Nondeterminism in LLM Inference", 2025). Each split starts
from an empty state and takes blocks of 64 keys in ascending order; splits are merged in ascending order. Prefill
computes all splits of a tile in one program, decode one split per program with a second kernel that merges. Both run
`_walk` and `_merge`, so the bits are the same. A masked key, block or split changes no bit: its factor is 1, its
summand 0.

Layout: the G query heads of a key-value head are rows (token t, head g is row t G + g), in tiles of 64 rows. Decode has
the same tiles, because another tile height compiles to another matrix instruction, which sums in another order. Keys
and values are contiguous [N, V, D], or paged [blocks, V, 64, D] with a table of block numbers: only addresses differ.
`tiles` int32 [., 5]: first token of the sequence's queries, first row of the tile, rows of the sequence, position of
its first query, and where its keys are (first token, or first entry of the table).

Trade-off: a tile of 64 rows in decode is mostly padding. Decode is bound by memory traffic all the same: 64 keys of
D = 128 are 32 KiB and 2.1 MFLOP, which at full bandwidth is a third of an H200's bfloat16 rate. Contraction to fused
multiply-adds is switched off, because the compiler could contract the two programs differently.

Twin: `block_attention`, which has no splits. In principle its bits are equal up to 512 keys; beyond, results agree
within the error below.
Error against float64 of the same inputs: 1e-2 of the largest |v| in bfloat16, 1e-5 in float32.
`operators` calls it for tensors on a GPU. Checked in Triton's interpreter; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.block_attention import BLOCK
from headrace.kernels.dispatch import jit, tl

SPLIT = 512
"""Keys of a split: a multiple of a block, never a function of batch or length."""
ROWS = 64
"""Rows of a tile."""


@jit
def _walk(  # type: ignore[no-untyped-def]
    x, k, v, table, base, head, heads, d, first, last, limit, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Keys first to last - 1 for the rows x [BM, BD]: maximum, sum and weighted values, from an empty state."""
    lane, near = tl.arange(0, BD), tl.arange(0, BK)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, BD), dtype=tl.float32)
    for start in range(first, last, BK):
        key = start + near
        if PAGED:
            place = (tl.load(table + base + start // BK).to(tl.int64) * heads + head) * BK + near
        else:
            place = (base + key).to(tl.int64) * heads + head
        inside = key < last
        ks = tl.load(k + place[None, :] * d + lane[:, None], mask=inside[None, :] & (lane < d)[:, None], other=0.0)
        vs = tl.load(v + place[:, None] * d + lane[None, :], mask=inside[:, None] & (lane < d)[None, :], other=0.0)
        if WIDE:
            ks, vs = ks.to(tl.float32), vs.to(tl.float32)
        s = tl.dot(x, ks, input_precision="ieee") * scale
        s = tl.where((key[None, :] <= limit[:, None]) & inside[None, :], s, float("-inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet
        p = tl.exp(s - safe[:, None])
        fade = tl.exp(peak - safe)
        total = total * fade + tl.sum(p, 1)
        out = out * fade[:, None] + tl.dot(p.to(vs.dtype), vs, input_precision="ieee")
        peak = top
    return peak, total, out


@jit
def _merge(peak, total, out, next_peak, next_total, next_out):  # type: ignore[no-untyped-def]
    """Merge the state so far with the next split. A split without a visible key changes no bit."""
    top = tl.maximum(peak, next_peak)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp(peak - safe), tl.exp(next_peak - safe)
    return top, total * old + next_total * new, out * old[:, None] + next_out * new[:, None]


@jit
def _rows_of(tiles, at, group, heads, head, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile: (indices of its rows in [tokens, V, G], which of them exist, last key that each sees, end of the tile's
    keys, where its sequence's keys are)."""
    token, first, rows = tl.load(tiles + at), tl.load(tiles + at + 1), tl.load(tiles + at + 2)
    start, base = tl.load(tiles + at + 3), tl.load(tiles + at + 4)
    row = first + tl.arange(0, BM)
    place = ((token + row // group).to(tl.int64) * heads + head) * group + row % group
    last = start + (tl.minimum(first + BM, rows) - 1) // group + 1
    return place, row < rows, start + row // group, last, base


@jit
def _whole_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, tiles, table, heads, group, d, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile, all splits of its keys in one program."""
    head, lane = tl.program_id(1), tl.arange(0, BD)
    place, live, limit, last, base = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
    mask = live[:, None] & (lane < d)[None, :]
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=mask, other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    mixed = tl.zeros((BM, BD), dtype=tl.float32)
    for first in range(0, last, SPLIT):
        a, b, c = _walk(
            x, k, v, table, base, head, heads, d, first, tl.minimum(first + SPLIT, last), limit, scale,
            PAGED, BM, BD, BK, WIDE,
        )  # fmt: skip
        peak, total, mixed = _merge(peak, total, mixed, a, b, c)
    tl.store(out + place[:, None] * d + lane[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + place, peak + tl.log(total), mask=live)


@jit
def _split_kernel(  # type: ignore[no-untyped-def]
    q, k, v, peaks, totals, mixes, tiles, table, heads, group, d, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile, one split: its maximum, sum and weighted values into scratch [tiles, V, splits, BM (, BD)]."""
    head, lane, split = tl.program_id(1), tl.arange(0, BD), tl.program_id(2)
    place, live, limit, last, base = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=live[:, None] & (lane < d)[None, :], other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    first = split * SPLIT
    a, b, c = _walk(
        x, k, v, table, base, head, heads, d, first, tl.minimum(first + SPLIT, last), limit, scale,
        PAGED, BM, BD, BK, WIDE,
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
    place, live, _, _, _ = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
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
    tl.store(lse + place, peak + tl.log(total), mask=live)


def tiles(tokens: Sequence[tuple[int, int, int, int]], group: int, device: torch.device) -> Tensor:
    """The tiles int32 [., 5] of sequences (first query token, queries, position of the first, where its keys are)."""
    rows = [
        (token, first, count * group, start, base)
        for token, count, start, base in tokens
        for first in range(0, count * group, ROWS)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 5)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, work: Tensor, longest: int, scale: float, split: bool
) -> tuple[Tensor, Tensor]:
    """q [tokens, H, D] -> (out like q, log-sum-exp float32 [tokens, H])."""
    heads, d = k.shape[1], q.shape[2]
    group = q.shape[1] // heads
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not len(work):
        return out, lse
    sizes: dict[str, Any] = {"BM": ROWS, "BD": max(16, dispatch.power_of_two(d))}
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    walk = sizes | options | {"PAGED": table is not None, "BK": BLOCK, "SPLIT": SPLIT, "WIDE": dispatch.INTERPRETED}
    pages = work if table is None else table
    if not split:
        _whole_kernel[(len(work), heads)](q, k, v, out, lse, work, pages, heads, group, d, scale, **walk)
        return out, lse
    splits = dispatch.tiles(longest, SPLIT)
    shape = (len(work), heads, splits, ROWS)
    peaks, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    mixes = torch.empty(*shape, sizes["BD"], dtype=torch.float32, device=q.device)
    _split_kernel[(len(work), heads, splits)](
        q, k, v, peaks, totals, mixes, work, pages, heads, group, d, scale, **walk
    )
    _merge_kernel[(len(work), heads)](
        peaks, totals, mixes, out, lse, work, heads, group, d, splits, **(sizes | options)
    )
    return out, lse


def packed_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, split: bool = False
) -> tuple[Tensor, Tensor]:
    """Causal attention within packed sequences: q [N, H, D], k and v [N, V, D] -> (out [N, H, D], log-sum-exp [N, H]).

    lengths: tokens of each sequence; they add up to N. split: run one program per split of the keys, with the same
    bits. The output has q's dtype, the log-sum-exp is float32.
    """
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    work = tiles(
        [(start, length, 0, start) for start, length in zip(starts, lengths, strict=True)],
        q.shape[1] // k.shape[1],
        q.device,
    )
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _attend(q, k, v, None, work, max(lengths, default=0), scale, split)


def cached_attention_triton(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Sequence[int], scale: float, *, split: bool = True
) -> Tensor:
    """`ragged_attention_triton` where every sequence brings T new tokens: q [B, T, H, D] -> [B, T, H, D]."""
    lengths = [q.shape[1]] * q.shape[0]
    return ragged_attention_triton(q.flatten(0, 1), keys, values, table, lengths, starts, scale, split=split).view_as(q)


def ragged_attention_triton(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], scale: float,
    *, split: bool = True,
) -> Tensor:  # fmt: skip
    """Twin of `block_attention.ragged_attention`: q [N, H, D] of new tokens over a paged cache that holds theirs.

    lengths: new tokens of each sequence, sum N; starts: position of its first. keys and values [blocks, V, 64, D];
    table int [B, n] of block numbers, any valid one where a sequence has fewer. Returns [N, H, D].
    """
    pages = table.to(torch.int32).contiguous()
    places, token = [], 0
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        places.append((token, length, start, row * pages.shape[1]))
        token += length
    work = tiles(places, q.shape[1] // keys.shape[1], q.device)
    longest = max((start + length for start, length in zip(starts, lengths, strict=True)), default=0)
    return _attend(q.contiguous(), keys.contiguous(), values.contiguous(), pages, work, longest, scale, split)[0]
