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
`tile`). A tile of fewer rows would compile to an instruction that sums in another order. Heads above 128 numbers (192
in latent attention) and float32 have one tile for both. Blocks of keys that all rows of a tile see need no mask. Decode
keeps the state of each split for the rows that exist, so one long sequence costs the others no memory. Keys and values
are contiguous [N, V, D], or paged [blocks, V, 64, D] with a table of block numbers: only addresses differ. `tiles`
int32 [., 5]: first token of the sequence's queries, first row of the tile, rows of the sequence, position of its first
query, and where its keys are (first token, or first entry of the table).

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.block_attention import BLOCK
from headrace.kernels.dispatch import HOPPER, Chip, jit, tl

SPLIT = 2048
"""Keys of a split: a multiple of a block, never a function of batch or length."""


class Tile(NamedTuple):
    """Rows of a tile, keys of a step, warps of a program and stages of its loop."""

    rows: int
    keys: int
    warps: int
    stages: int


MANY, FEW = Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)
"""For whole sequences and for few new tokens."""
WIDE, WIDE_SMALL = Tile(64, 32, 8, 3), Tile(64, 32, 8, 2)
"""For heads above `NARROW`, with larger tiles of which the registers do not suffice; on chips with less shared memory
than Hopper."""
SINGLE, SINGLE_WIDE = Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)
"""For float32, which the tensor cores do not multiply."""
NARROW = 128
"""Widest head, as a power of two, that the tiles without "wide" take."""
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
    q, k, v, peaks, totals, mixes, tiles, parts, table, heads, group, d, high, scale,
    PAGED: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    FULL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One split of a tile: its maximum, sum and weighted values into scratch [parts, V, high (, BD)].

    parts int32 [., 2]: tile, split. high: rows of scratch, at least those of the tile that exist.
    """
    part, head, lane, near = tl.program_id(0), tl.program_id(1), tl.arange(0, BD), tl.arange(0, BM)
    tile, split = tl.load(parts + part * 2), tl.load(parts + part * 2 + 1)
    place, live, limit, low, last, base = _rows_of(tiles, tile * 5, group, heads, head, BM)
    x = tl.load(q + place[:, None] * d + lane[None, :], mask=live[:, None] & (lane < d)[None, :], other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    first = split * SPLIT
    a, b, c = _walk(
        x, k, v, table, base, head, heads, d, first, tl.minimum(first + SPLIT, last), limit, low,
        scale * 1.4426950408889634, PAGED, BM, BD, BK, PAGE, FULL, WIDE,
    )  # fmt: skip
    at = (part.to(tl.int64) * heads + head) * high + near
    tl.store(peaks + at, a, mask=live)
    tl.store(totals + at, b, mask=live)
    tl.store(mixes + at[:, None] * BD + lane[None, :], c, mask=live[:, None])


@jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    peaks, totals, mixes, out, lse, tiles, firsts, heads, group, d, high, BM: tl.constexpr, BD: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile: its splits in ascending order. firsts int32 [tiles]: the first of a tile's parts."""
    head, lane, near = tl.program_id(1), tl.arange(0, BD), tl.arange(0, BM)
    place, live, _, _, last, _ = _rows_of(tiles, tl.program_id(0) * 5, group, heads, head, BM)
    part = tl.load(firsts + tl.program_id(0)).to(tl.int64)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    mixed = tl.zeros((BM, BD), dtype=tl.float32)
    for split in range(0, tl.cdiv(last, SPLIT)):
        at = ((part + split) * heads + head) * high + near
        a, b = tl.load(peaks + at, mask=live, other=0.0), tl.load(totals + at, mask=live, other=1.0)
        c = tl.load(mixes + at[:, None] * BD + lane[None, :], mask=live[:, None], other=0.0)
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


class Parts(NamedTuple):
    """The splits of the keys of some tiles."""

    listed: Tensor
    """int32 [., 2]: tile, split; ascending."""
    firsts: Tensor
    """int32 [tiles]: the first of each tile's parts."""
    high: int
    """Most rows of a tile that exist, as a power of two."""


@functools.lru_cache(maxsize=32)
def parts(queries: tuple[Queries, ...], group: int, height: int, split: int, device: torch.device) -> Parts:
    """The splits of `split` keys of the tiles that `tiles` gives: of each as many as its last row sees. Kept as they
    are."""
    work = tiles(queries, group, height, torch.device("cpu")).long()
    ends = torch.minimum(work[:, 1] + height, work[:, 2])
    counts = (work[:, 3] + (ends - 1) // group) // split + 1
    firsts = counts.cumsum(0) - counts
    of = torch.repeat_interleave(torch.arange(len(work)), counts)
    listed = torch.stack((of, torch.arange(len(of)) - firsts[of]), 1)
    high = dispatch.power_of_two(int((ends - work[:, 1]).max()))
    return Parts(listed.int().to(device), firsts.int().to(device), high)


def _few(rows: Sequence[int], heads: int) -> bool:
    """Whether whole tiles of these sequences would be mostly padding, or too few to fill a GPU."""
    count = sum(dispatch.tiles(each, MANY.rows) for each in rows)
    return count * heads < PROGRAMS or 2 * sum(rows) < count * MANY.rows


def _tile(dtype: torch.dtype, width: int, split: bool, chip: Chip) -> Tile:
    """width: of a head, as a power of two. Where the arithmetic depends on the tile, it is that of both ways."""
    if dtype == torch.float32:
        return SINGLE if width <= NARROW else SINGLE_WIDE
    if width > NARROW:
        return WIDE if chip.shared_bytes >= HOPPER.shared_bytes else WIDE_SMALL
    return FEW if split else MANY


def _attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, queries: tuple[Queries, ...], scale: float,
    split: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [tokens, H, D] -> (out like q, log-sum-exp float32 [tokens, H]). split: None chooses what is faster."""
    heads, d = k.shape[1], q.shape[2]
    group, width = q.shape[1] // heads, max(16, dispatch.power_of_two(d))
    if split is None:
        split = _few([count * group for _, count, _, _ in queries], heads)
    tile = _tile(q.dtype, width, split, dispatch.chip(q.device))
    work = tiles(queries, group, tile.rows, q.device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not len(work):
        return out, lse
    sizes: dict[str, Any] = {"BM": tile.rows, "BD": width, "SPLIT": SPLIT}
    options: dict[str, Any] = {"enable_fp_fusion": False}
    walk = {
        "PAGED": table is not None, "BK": tile.keys, "PAGE": BLOCK, "FULL": width == d, "WIDE": dispatch.INTERPRETED,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    pages = work if table is None else table
    if not split:
        _whole_kernel[(len(work), heads)](
            q, k, v, out, lse, work, pages, heads, group, d, scale, **sizes, **options, **walk
        )
        return out, lse
    listed, firsts, high = parts(queries, group, tile.rows, SPLIT, q.device)
    shape = (len(listed), heads, high)
    peaks, totals = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    mixes = torch.empty(*shape, width, dtype=torch.float32, device=q.device)
    _split_kernel[(len(listed), heads)](
        q, k, v, peaks, totals, mixes, work, listed, pages, heads, group, d, high, scale, **sizes, **options, **walk
    )
    warps = tile.warps * (2 if width > NARROW else 1)  # it works element by element: warps change no bit
    _merge_kernel[(len(work), heads)](
        peaks, totals, mixes, out, lse, work, firsts, heads, group, d, high, num_warps=warps, **sizes, **options
    )
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
