"""Quantisation of moments to eight bits: its error by block, and the property that it does not depend on shards."""

import pytest
import torch
from torch import Tensor

from headrace.algorithms import adamw, eight_bit
from headrace.algorithms.adamw import AdamW, OptimizerSettings
from headrace.algorithms.eight_bit import BLOCK, Levels

CPU = torch.device("cpu")
NARROW = OptimizerSettings(moments=torch.uint8)


def spread(rows: int, width: int, signed: bool) -> Tensor:
    """Numbers over nine decades."""
    generator = torch.Generator().manual_seed(width)
    x = 10.0 ** (-9.0 * torch.rand(rows, width, generator=generator))
    return x * torch.randn(rows, width, generator=generator).sign() if signed else x


def bound(ratio: Tensor, signed: bool) -> Tensor:
    """The largest error of a number as a share of its block's scale. Of 10^-d to 10^(1-d) there are 2^(7-d) levels, or
    twice as many for the second moment: half of the distance between two of them."""
    decade = (-torch.log10(ratio.clamp(min=1e-30))).floor().clamp(0, 6)
    error = 0.45 * 10.0**-decade / 2.0 ** (6 - decade + (0 if signed else 1))
    return torch.where(ratio < 2e-6, torch.tensor(1.7e-6), error) * (1 + 1e-5)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [8, 256, 700])
def test_the_error_of_each_number_is_below_half_the_distance_of_levels(signed: bool, width: int) -> None:
    levels = Levels.on(CPU, signed=signed)
    assert len(levels.values) == 256 and (levels.values.diff() > 0).all()
    assert (levels.values == 0.0).any() == signed
    x = spread(64, width, signed)
    codes, scales = eight_bit.quantise(x, levels)
    assert codes.dtype == torch.uint8 and scales.shape == (64, -(-width // BLOCK))
    for start in range(0, width, BLOCK):
        block, scale = x[:, start : start + BLOCK], scales[:, start // BLOCK, None]
        assert torch.equal(scale, block.abs().amax(1, keepdim=True))
        got = eight_bit.dequantise(codes, scales, levels)[:, start : start + BLOCK]
        ratio = (block / scale).abs().double()
        assert ((got - block).abs().double() / scale <= bound(ratio, signed)).all()
        assert torch.equal(got.abs().amax(1, keepdim=True), scale), "the largest element is exact"


def test_a_block_of_zeros_stays_zero_and_a_small_second_moment_does_not_become_zero() -> None:
    for signed in (True, False):
        levels = Levels.on(CPU, signed=signed)
        assert not eight_bit.dequantise(*eight_bit.quantise(torch.zeros(2, 300), levels), levels).any()
    codes, scales = eight_bit.quantise(torch.tensor([[1.0, 1e-12, 0.0]]), levels)
    assert eight_bit.dequantise(codes, scales, levels).tolist() == [[1.0, pytest.approx(1e-7), pytest.approx(1e-7)]]


def updates(parameter: Tensor, gradients: list[Tensor], settings: OptimizerSettings) -> AdamW:
    optimizer = AdamW({"w": parameter}, settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step(1e-2, parameter)
    return optimizer


def drawn(*shape: int, count: int = 4) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("shape", [(12, 264), (6, 16, 40)])
def test_rows_have_the_bits_that_they_have_in_the_whole(shape: tuple[int, ...]) -> None:
    start, gradients = drawn(*shape)
    whole = start.clone()
    optimizer = updates(whole, gradients, NARROW)
    for ranks in (2, 3):
        for rows in range(0, shape[0], shape[0] // ranks):
            part = slice(rows, rows + shape[0] // ranks)
            shard = start[part].clone()
            own = updates(shard, [gradient[part] for gradient in gradients], NARROW).moments[shard]
            assert torch.equal(shard, whole[part])
            assert all(
                torch.equal(tensor, optimizer.moments[whole].tensors("x")[name][part])
                for name, tensor in own.tensors("x").items()
            )


def test_the_format_may_change_between_updates() -> None:
    start, gradients = drawn(8, 300, count=6)
    wide, changing = start.clone(), start.clone()
    updates(wide, gradients, OptimizerSettings())
    optimizer = AdamW({"w": changing}, OptimizerSettings())
    kinds = (torch.float32, torch.uint8, torch.uint8, torch.bfloat16, torch.uint8, torch.float32)
    for gradient, kind in zip(gradients, kinds, strict=True):
        changing.grad = gradient.clone()
        optimizer.settings = OptimizerSettings(moments=kind)
        optimizer.step(1e-2, changing)
        moments = optimizer.moments[changing]
        assert moments.exp_avg.dtype == moments.exp_avg_sq.dtype == kind
        coded = kind == torch.uint8
        assert (moments.exp_avg_scale is not None) == (moments.exp_avg_sq_scale is not None) == coded
    assert moments.step == 6.0 and not torch.equal(changing, wide)
    assert (changing - wide).norm() / (wide - start).norm() < 0.05


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gradients = drawn(200, 24)
    whole, cut = start.clone(), start.clone()
    updates(whole, gradients, NARROW)
    monkeypatch.setattr(adamw, "PIECE", 64 * 24)
    updates(cut, gradients, NARROW)
    assert torch.equal(whole, cut)


def test_vectors_keep_float32() -> None:
    start, gradients = drawn(40)
    narrow, wide = start.clone(), start.clone()
    optimizer = updates(narrow, gradients, NARROW)
    updates(wide, gradients, OptimizerSettings())
    assert torch.equal(narrow, wide) and optimizer.moments[narrow].exp_avg.dtype == torch.float32


def test_an_element_without_gradients_comes_to_rest() -> None:
    """Beside large neighbours its moments are small in their block: with a level 0 for the second, its first moment
    would be divided by epsilon."""
    start = torch.zeros(1, 256)
    gradient = torch.ones(1, 256)
    gradient[0, 1:] = 1e-4
    rest = torch.zeros(1, 256)
    rest[0, 0] = 1.0
    updates(start, [gradient] * 2 + [rest] * 20, NARROW)
    assert start.abs().max() < 2 * 22 * 1e-2
