"""Block attention against float64, and its backward against autograd of the plain formula."""

import pytest
import torch
from torch import Tensor

from headrace.kernels import block_attention
from headrace.kernels.attention import paged_product
from headrace.kernels.block_attention import BLOCK, Packing
from tests.kernels.plain import plain_attention

torch.set_num_threads(1)
LENGTHS = [1, 64, 65, 0, 200, 33, 191]


def drawn(heads: int, kv_heads: int, dim: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(sum(LENGTHS), count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return plain_attention(q, k, v, LENGTHS, scale)[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (2, 2)])
def test_packed_attention_and_its_gradient(heads: int, kv_heads: int) -> None:
    q, k, v = drawn(heads, kv_heads)
    got = block_attention.packed_attention(q, k, v, Packing(LENGTHS), 0.3)
    want = plain(q.double(), k.double(), v.double(), 0.3)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    pull = torch.randn(got.shape, generator=torch.Generator().manual_seed(5))
    for a, b in zip(
        torch.autograd.grad((got * pull).sum(), (q, k, v)),
        torch.autograd.grad((want * pull).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def test_what_stands_behind_a_query_does_not_show() -> None:
    """Longer sequences, other neighbours, more masked blocks: the same bits for the same past."""
    q, k, v = (x.detach() for x in drawn(3, 1))
    start, end = 130, 330  # the sequence of 200
    whole = block_attention.packed_attention(q, k, v, Packing(LENGTHS), 0.3)[start:end]
    for length in (1, 63, 64, 65, 150, 200):
        part = [x[start : start + length] for x in (q, k, v)]
        alone = block_attention.packed_attention(part[0], part[1], part[2], Packing([length]), 0.3)
        assert torch.equal(alone, whole[:length])


@pytest.mark.parametrize("portion", [1 << 20, 1, 3 * 2 * BLOCK * 24 * 4])
def test_a_paged_cache_gives_the_same_bits(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks that are gathered at once changes no bit: all, each one alone, and three."""
    monkeypatch.setattr(paged_product, "PORTION_BYTES", portion)
    q, k, v = (x.detach()[130:330] for x in drawn(4, 2))
    whole = block_attention.packed_attention(q, k, v, Packing([200]), 0.3)
    keys, values = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 4 * BLOCK - 200)).view(4, BLOCK, 2, 24).transpose(1, 2).contiguous()
        for x in (k, v)
    )
    order = torch.tensor([2, 0, 3, 1])
    shuffled = [torch.empty_like(pool).index_copy_(0, order, pool) for pool in (keys, values)]
    for first, steps in ((0, 200), (199, 1), (64, 3), (63, 2), (100, 77), (0, 1)):
        at = torch.arange(first, first + steps)[None]
        for table in (order[None], torch.cat((order, torch.zeros(3, dtype=torch.int64)))[None]):
            pages = block_attention.paging(table, at, 2, q)
            new = q[None, first : first + steps]
            got = block_attention.cached_attention(new, shuffled[0], shuffled[1], pages, 0.3)
            assert torch.equal(got[0], whole[first : first + steps])


def test_buckets_hold_every_token_once() -> None:
    packing = Packing(LENGTHS)
    rows = torch.cat([bucket.rows for bucket in packing.buckets])
    assert sorted(rows.tolist()) == list(range(sum(LENGTHS)))
    assert packing.positions.tolist() == [at for length in LENGTHS for at in range(length)]
    assert [(bucket.sequences, bucket.queries, bucket.keys) for bucket in packing.buckets] == [
        (3, 64, 64), (1, 96, 128), (1, 192, 192), (1, 224, 256)
    ]  # fmt: skip
