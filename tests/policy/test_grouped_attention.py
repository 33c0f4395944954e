"""Attention of ordinary mode against torch's own, forward and backward, with grouped queries and any mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.attention import paged_product
from headrace.kernels.block_attention import Packing
from headrace.policy import attention
from headrace.policy.grouped_attention import grouped_attention, mask_of, paged_grouped_attention


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("masked", [64, 40], ids=["all keys", "last keys"])
def test_any_mask_forward_and_backward(masked: int) -> None:
    torch.manual_seed(1)
    batch, heads, group, steps, keys, dim = 3, 2, 4, 5, 64, 16
    q, k, v = (drawn(batch, count, length, dim) for count, length in ((8, steps), (2, keys), (2, keys)))
    hidden = torch.rand(batch, steps, keys) < 0.4
    hidden[..., : keys - masked or 1] = False
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None], scale=0.3, enable_gqa=True)
    rows = q.view(batch, heads, group, steps, dim).transpose(2, 3).reshape(batch * heads, steps * group, dim)
    flat_k, flat_v = (x.view(batch * heads, keys, dim) for x in (k, v))
    mask = mask_of(hidden[..., keys - masked :], group, q.dtype)
    got = grouped_attention(rows, flat_k, flat_v, mask, 0.3)
    got = got.view(batch, heads, steps, group, dim).transpose(2, 3).reshape(want.shape)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    slope = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad((got * slope).sum(), (q, k, v)), torch.autograd.grad((want * slope).sum(), (q, k, v)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("portion", [1, 1 << 30], ids=["a sequence at a time", "at once"])
def test_a_paged_pool_gives_what_adjacent_keys_give(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_product, "PORTION_BYTES", portion)
    torch.manual_seed(4)
    sequences, blocks, length, dim = 6, 3, 16, 8
    keys, values = torch.randn(2, 40, length, dim).unbind()
    places = torch.randperm(40)[: sequences * blocks]
    q, hidden = torch.randn(sequences, 4, dim), torch.rand(1, 4, blocks * length - 1) < 0.3
    mask = mask_of(hidden, 1, q.dtype)
    k, v = (x[places].view(sequences, blocks * length, dim) for x in (keys, values))
    want = grouped_attention(q, k, v, mask, 0.3)
    assert torch.equal(paged_grouped_attention(q, keys, values, places, mask, 0.3), want)


@pytest.mark.parametrize("lengths", [[5, 130, 64, 1, 200], [300, 7]], ids=["short", "both"])
def test_packed_sequences_in_bfloat16_are_close_to_float32(lengths: list[int]) -> None:
    """Short sequences that are trained on take the plain products, longer ones the fused call."""
    torch.manual_seed(2)
    total = sum(lengths)
    wide = [drawn(total, count, 16) for count in (4, 2, 2)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    packing = Packing(lengths)
    slope = torch.randn(total, 4, 16)
    want = attention.packed(wide[0], wide[1], wide[2], packing, 0.25, exact=False)
    got = attention.packed(narrow[0], narrow[1], narrow[2], packing, 0.25, exact=False)
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.03)
    for mine, theirs in zip(
        torch.autograd.grad((got.float() * slope).sum(), narrow), torch.autograd.grad((want * slope).sum(), wide),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine.float(), theirs, rtol=0.05, atol=0.1)
