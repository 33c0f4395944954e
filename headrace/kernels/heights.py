"""Numbers of rows at which a matrix product gives a row the same bits on this processor.

Idea: a BLAS chooses its kernel, and with it the order of a row's sums, by the number of rows (AMX tiles, small
matrices, single rows), and no documentation says where. So products are computed here, by operands that cancel, and
their rows compared. Where every height that is tried agrees in multiples of some tile, a product is one call, padded to
the tile. Elsewhere it is cut into tiles of the heights that agree, and no other height is ever computed.

The search runs once for each shape, dtype, kind of call and number of torch threads, at the first product of exact mode
that needs it; `policy.numerics_probe` asks for all of a model's shapes at the start.

Operands cancel: they come in pairs whose products are x and -x at random places of the reduction, so that the exact
sum is 0 and the result is nothing but the rounding of the partial sums. Another order of the sums then changes a fifth
of all results, also after rounding to 16 bits; with random operands it changes one in thousands, and a search would
miss it (it did: a bfloat16 router of 64 x 8 passed with a padding of 4 rows and needs 9).
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.kernels import dispatch

Operands = tuple[Tensor, Tensor]
Product = Callable[[Tensor, Tensor], Tensor]
TILES = (4, 8, 16, 32, 64)
"""The smallest heights that are tried: a single decoded token is padded to one of them."""
LARGEST = (1024, 256)
"""The most rows of a product that is tried: by matrices of at most `CELLS` numbers, and by larger ones."""
CELLS = 1 << 22
_BETWEEN = (12, 20, 36, 68, 100, 200, 500, 640, 768, 896)
"""Heights that are tried in addition to the powers of two."""
_DRAWN = 4096
"""Columns that are drawn; a wider matrix repeats them."""


class RowsDiffer(HeadraceError):
    """No number of rows gives a row the same bits wherever it stands: exact mode does not hold."""


class Heights(NamedTuple):
    """The heights of one kind of product."""

    tiles: tuple[int, ...]
    """Heights that agree, ascending; each is a multiple of those before it."""
    whole: bool
    """Whether every multiple of the smallest tile agrees."""
    digest: bytes
    """A hash of a product: equal where the bits are."""

    def pieces(self, rows: int) -> list[int]:
        """The heights of the products that together have `rows` rows, or up to one smallest tile more."""
        left = rows + -rows % self.tiles[0]
        if self.whole or left in self.tiles:
            return [left]
        pieces = []
        for tile in reversed(self.tiles):
            count, left = divmod(left, tile)
            pieces += [tile] * count
        return pieces

    def has(self, height: int) -> bool:
        """Whether one product may have this height."""
        return height in self.tiles or (self.whole and height % self.tiles[0] == 0)


_PLANNED = Heights((8,), True, b"")
"""Heights where bytes are counted: which ones a CPU needs changes few of them."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [N, K].T."""
    return torch.mm(x, weight.t())


def scores(x: Tensor, keys: Tensor) -> Tensor:
    """x [B, M, K] @ keys [B, N, K].T, batch by batch."""
    return torch.bmm(x, keys.transpose(1, 2))


def shares(x: Tensor, values: Tensor) -> Tensor:
    """x [B, M, K] @ values [B, K, N], batch by batch."""
    return torch.bmm(x, values)


def batched(product: Product, x: Tensor, matrices: Tensor, exact: bool = True) -> Tensor:
    """`scores` or `shares` in products of the heights that agree, for any number of rows; one product where not exact.
    Differentiable."""
    if not exact:
        return product(x, matrices)
    rows, n = x.shape[1], matrices.shape[1 if product is scores else 2]
    pieces = agreeing(product, x.shape[2], n, x.dtype).pieces(rows)
    if pieces == [rows]:
        return product(x, matrices)
    extra = sum(pieces) - rows
    x = F.pad(x, (0, 0, 0, extra)) if extra else x
    return torch.cat([product(part, matrices) for part in torch.split(x, pieces, 1)], 1)[:, :rows]


def common(first: Heights, second: Heights, rows: int) -> int:
    """The smallest height from `rows` on of one product of both kinds. RowsDiffer if there is none."""
    if first.whole and second.whole:
        return rows + -rows % max(first.tiles[0], second.tiles[0])
    both = [tile for tile in {*first.tiles, *second.tiles} if tile >= rows and first.has(tile) and second.has(tile)]
    if not both:
        raise RowsDiffer(f"no product of {rows} rows or more agrees with others here")
    return min(both)


def agreeing(product: Product, k: int, n: int, dtype: torch.dtype) -> Heights:
    """The heights of `linear`, `scores` or `shares` with K and N, for the torch threads now set. RowsDiffer."""
    if dispatch.STANDING.counted:
        return _PLANNED
    return _found(product, k, n, dtype, torch.get_num_threads())


@functools.cache
def _found(product: Product, k: int, n: int, dtype: torch.dtype, threads: int) -> Heights:
    with torch.no_grad():
        most = LARGEST[k * n > CELLS]
        x, weight = cancelling(torch.Generator().manual_seed(0), dtype, most, (min(n, _DRAWN), k))
        weight = weight.repeat(-(-n // _DRAWN), 1)[:n]
        right = weight.t().contiguous() if product is shares else weight

        def rows(first: int, height: int) -> Tensor:
            part = x[first : first + height].contiguous()
            if product is linear:
                return product(part, right)[None]
            # A library may count the rows of all members, and take another path with one.
            pair = product(part.expand(2, -1, -1).contiguous(), right.expand(2, -1, -1).contiguous())
            return torch.cat((product(part[None], right[None]), pair))

        powers = [1 << power for power in range(2, most.bit_length())]
        return _chosen(rows, powers, most, f"{k} to {n} in {str(dtype).removeprefix('torch.')}, {threads} threads")


def _chosen(rows: Callable[[int, int], Tensor], powers: Sequence[int], most: int, name: str) -> Heights:
    """The heights whose rows have the bits of the largest product that also a small one agrees with.

    rows: (first row, height) -> products of these rows [members, height, N].
    """
    for largest in reversed(powers):
        truth = torch.cat([rows(first, largest) for first in range(0, most, largest)], 1)

        def agrees(height: int, truth: Tensor = truth) -> bool:
            at = min(13, most - height)  # a row stands elsewhere than in the largest product
            return bool((rows(at, height) == truth[:1, at : at + height]).all())

        tiles = [height for height in powers if height <= largest and agrees(height)]
        if not tiles or tiles[0] > TILES[-1]:
            continue
        digest = hashlib.sha256(truth[0, : TILES[-1]].float().contiguous().numpy().tobytes()).digest()
        if largest == powers[-1]:
            between = [height for height in _BETWEEN if height <= most and agrees(height)]
            for tile in TILES:
                tried = [height for height in (*powers, *_BETWEEN) if height <= most and height % tile == 0]
                if all(height in tiles or height in between for height in tried):
                    return Heights((tile,), True, digest)
        return Heights(tuple(tiles), False, digest)
    raise RowsDiffer(f"rows of a matrix product depend on their place among 4 to {most} rows ({name})")


def pairs(generator: torch.Generator, k: int) -> tuple[Tensor, Tensor]:
    """A random pairing of k places: (index int64 [k] below max(1, k // 2), sign float32 [k]).

    x[..., index] times u[..., index] * sign sums to 0 exactly; an odd place out has sign 0.
    """
    half = max(1, k // 2)
    place = torch.randperm(k, generator=generator)
    sign = torch.where(place < half, 1.0, -1.0) * (place < 2 * half)
    return place % half, sign


def cancelling(generator: torch.Generator, dtype: torch.dtype, rows: int, shape: Sequence[int]) -> Operands:
    """x [rows, K] and weight [..., N, K] of `shape` whose products are 0 but for rounding."""
    index, sign = pairs(generator, shape[-1])
    x = torch.randn(rows, len(index), generator=generator)[:, index]
    weight = torch.randn(*shape, generator=generator)[..., index] * sign
    return x.to(dtype), weight.to(dtype)
