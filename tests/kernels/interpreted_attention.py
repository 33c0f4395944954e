"""The attention kernels in Triton's interpreter against float64, and against each other bit for bit."""

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.attention import forward
from headrace.kernels.attention.backward import packed_attention_backward_triton
from headrace.kernels.attention.forward import cached_attention_triton, packed_attention_triton
from headrace.kernels.block_attention import BLOCK
from tests.kernels.cases import dtypes, shapes
from tests.kernels.plain import plain_attention

# Dtypes and the bound on an element's error, as part of the largest value: the interpreter truncates to bfloat16.
DTYPES = dtypes((torch.float32, 1e-5), (torch.bfloat16, 1e-2))


def drawn(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(tokens, count, dim).to(dtype) for count in (heads, kv_heads, kv_heads))
    return q, k, v


def paged(x: Tensor, blocks: int) -> Tensor:
    """[S, V, D] -> [blocks, V, 64, D]."""
    out = x.new_zeros(blocks * BLOCK, *x.shape[1:])
    out[: len(x)] = x
    return out.view(blocks, BLOCK, *x.shape[1:]).transpose(1, 2).contiguous()


def prefill() -> None:
    for dtype, bound in DTYPES:
        for heads, kv_heads, dim, lengths in shapes((3, 1, 24, [1, 70, 0, 33]), (4, 2, 40, [65]), (2, 2, 16, [64])):
            q, k, v = drawn(sum(lengths), heads, kv_heads, dim, dtype)
            out, lse = packed_attention_triton(q, k, v, lengths, 0.3)
            want, norm = plain_attention(q.double(), k.double(), v.double(), lengths, 0.3)
            assert out.dtype == dtype and float((out.double() - want).abs().max()) <= bound * float(v.abs().max())
            torch.testing.assert_close(lse.double(), norm, rtol=0, atol=1e-4)


def invariance() -> None:
    """Prefill, decode, splits by one program or many, paged or not, alone or in a batch: the same bits."""
    forward.SPLIT = 2 * BLOCK  # several splits in short sequences
    if dispatch.INTERPRETED:
        forward.MANY = forward.FEW  # the interpreter's product depends on the number of rows, a GPU's does not
    for dtype, _ in DTYPES:
        lengths = [300, 7]
        q, k, v = drawn(sum(lengths), 2, 1, 16, dtype)
        whole, lse = packed_attention_triton(q, k, v, lengths, 0.3)
        cut, again = packed_attention_triton(q, k, v, lengths, 0.3, split=True)
        assert torch.equal(cut, whole) and torch.equal(again, lse), "who computes a split shows"
        alone, _ = packed_attention_triton(q[:200], k[:200], v[:200], [200], 0.3)
        assert torch.equal(alone, whole[:200]), "what stands behind a query or beside its sequence shows"
        keys, values = (torch.cat((paged(x[:300], 5), paged(x[300:], 1))) for x in (k, v))
        order = torch.tensor([4, 0, 3, 1, 5, 2])
        k_pool, v_pool = (torch.empty_like(x).index_copy_(0, order, x) for x in (keys, values))
        table = torch.stack((order[:5], torch.cat((order[5:], order[:4]))))
        # The interpreter's product may depend on a row's place in a tile, a GPU's does not: compare at equal places.
        for first in shapes(64, 288, 96):
            last = torch.stack((q[first : first + 4], torch.cat((q[300:301], q[300:303]))))
            for split in (False, True):
                got = cached_attention_triton(last, k_pool, v_pool, table, [first, 0], 0.3, split=split)
                one = cached_attention_triton(last[:1], k_pool, v_pool, table[:1], [first], 0.3, split=split)
                assert torch.equal(got[0], one[0]), "batch shows"
                if first % 32 == 0:
                    assert torch.equal(got[0], whole[first : first + 4]), "decode is not prefill"


def gradients() -> None:
    for dtype, bound in dtypes((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for heads, kv_heads, dim, lengths in shapes((3, 1, 24, [1, 70, 0]), (2, 2, 16, [64, 9]), (4, 2, 40, [33])):
            q, k, v = drawn(sum(lengths), heads, kv_heads, dim, dtype)
            out, lse = packed_attention_triton(q, k, v, lengths, 0.3)
            pull = torch.randn(out.shape).to(dtype)
            got = packed_attention_backward_triton(pull, q, k, v, out, lse, lengths, 0.3)
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            want, _ = plain_attention(leaves[0], leaves[1], leaves[2], lengths, 0.3)
            for a, b in zip(got, torch.autograd.grad((want * pull.double()).sum(), leaves), strict=True):
                assert a.dtype == dtype and float((a.double() - b).norm() / b.norm()) <= bound
            if lengths[0] == 64:
                a, b, c, d, e, f = (x[:64] for x in (pull, q, k, v, out, lse))
                mine = packed_attention_backward_triton(a, b, c, d, e, f, [64], 0.3)
                assert all(torch.equal(x, y[:64]) for x, y in zip(mine, got, strict=True)), "another sequence shows"


KERNELS = {"attention_prefill": prefill, "attention_decode": invariance, "attention_backward": gradients}
