"""Four-bit numbers in blocks of 16: exact widening, the same bytes a second time, bounded error, rows apart."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.block_scaled import nvfp4
from headrace.kernels.operators import rounded, rounded_weights
from tests.kernels.test_mxfp8 import draws


def of_rows(x: Tensor) -> Tensor:
    """x with each row rounded as a tensor."""
    return rounded(x, "nvfp4")


ELEMENTS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def steps(scale: Tensor, outer: Tensor) -> Tensor:
    """The scale of each number."""
    return (scale.double() * outer.double()[..., None]).repeat_interleave(16, -1)


def test_a_tensors_scale_is_the_smallest_power_of_two_under_which_the_largest_block_scale_fits() -> None:
    amax = torch.tensor([6 * 464.0, 6 * 464.001, 6 * 448.0, 6 * 232.0, 6 * 232.001, 1.0, 1e-40, 0.0, 1e38])
    outer = nvfp4.outer_scale(amax).double()
    assert outer.tolist()[:5] == [1.0, 2.0, 1.0, 0.5, 1.0]
    assert bool((amax.double() <= 6 * 464 * outer).all()) and bool((torch.log2(outer) % 1 == 0).all())
    assert bool((amax.double() > 6 * 464 * outer / 2)[[0, 1, 2, 3, 4, 5, 8]].all())
    assert outer[6] == outer[7] == 2.0**-100
    assert bool(nvfp4.outer_scale(torch.tensor([torch.inf, torch.nan])).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_and_scales_are_to_nearest_even(dtype: torch.dtype) -> None:
    """Against torch's own rounding to e4m3 and a search of all elements, in float64."""
    x = (draws("heavy", 64, 96) * torch.exp2(torch.linspace(-9, 9, 96))).to(dtype)
    outer = nvfp4.outer_of_matrices(x)
    q, scale = nvfp4.quantise(x, outer)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (torch.uint8, (64, 48), torch.float8_e4m3fn, (64, 6))
    amax = x.float().reshape(64, 6, 16).abs().amax(-1)
    assert torch.equal(scale.float(), (amax / 6 / outer[:, None]).clamp(2.0**-6, 448).to(scale.dtype).float())
    ratio = x.double().abs() / steps(scale, outer)
    apart = (ratio[..., None] - ELEMENTS.double()).abs()
    nearest = apart == apart.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    index = torch.where(nearest.sum(-1) > 1, (nearest & even).int().argmax(-1), nearest.int().argmax(-1))
    got = nvfp4.dequantise(q, scale, outer, torch.float64)
    assert torch.equal(got, (ELEMENTS.double()[index] * steps(scale, outer)).copysign(x.double()))
    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]])
    back = nvfp4.dequantise(*nvfp4.quantise(ties, torch.ones(1)), torch.ones(1), dtype)
    assert back[0].abs().tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, 1, 1, 2, 2, 4, 4, 0]


def test_widening_gives_the_host_nothing_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of numbers on a GPU is copied from the host, which waits for it in every call."""
    q = torch.arange(8, dtype=torch.uint8) * 2
    q = q | ((q + 1) << 4)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a list of numbers")

    monkeypatch.setattr(torch, "tensor", refused)
    got = nvfp4.dequantise(q[None], torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1), torch.float32)
    assert torch.equal(got[0].view(torch.int32), torch.cat((ELEMENTS, -ELEMENTS)).view(torch.int32)), "-0.0 too"


def test_what_is_not_finite_shows_and_zero_stays() -> None:
    x = torch.zeros(3, 32)
    x[0, 3], x[1, 20] = torch.nan, -5.0
    back = of_rows(x)
    assert bool(back[0].isnan().all()) and float(back[1, 20]) == pytest.approx(-5.0, rel=0.07)
    assert int((back[1:] != 0).sum()) == 1
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantise(torch.zeros(2, 40), torch.ones(2))
    assert of_rows(torch.zeros(0, 96)).shape == (0, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["heavy", "outliers", "far"])
def test_widening_is_exact_and_a_second_time_gives_the_same_bytes(dtype: torch.dtype, kind: str) -> None:
    """far: blocks that lie 2^14 below their tensor's largest number and lower."""
    x = draws("heavy" if kind == "far" else kind, 64, 96)
    if kind == "far":
        x = x * torch.exp2(torch.linspace(0, -24, 96))
    x = x.to(dtype)
    for outer in (nvfp4.outer_of_rows(x), nvfp4.outer_of_matrices(x)):
        q, scale = nvfp4.quantise(x, outer)
        once = nvfp4.dequantise(q, scale, outer, dtype)
        assert torch.equal(once.double(), nvfp4.dequantise(q, scale, outer, torch.float64))
        of = nvfp4.outer_of_matrices(once) if bool((outer == outer[0]).all()) else nvfp4.outer_of_rows(once)
        again = nvfp4.quantise(once, of)
        assert torch.equal(of, outer) and torch.equal(again[0], q)
        assert torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))


def test_a_small_update_of_numbers_on_the_grid_changes_few() -> None:
    """An update of each weight by a thousandth does not take scales across a border."""
    x = rounded_weights(draws("normal", 64, 256), "nvfp4")
    noise = 1 + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded_weights(x * noise, "nvfp4"), x)


@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers"])
@pytest.mark.parametrize("width", [128, 1024])
def test_a_products_error_is_that_of_four_bits(kind: str, width: int) -> None:
    a, b = draws(kind, 128, width), draws(kind, 128, width, seed=1)
    outer = nvfp4.outer_of_rows(a)
    q, scale = nvfp4.quantise(a, outer)
    size, step = a.double().abs(), steps(scale, outer)
    error = (nvfp4.dequantise(q, scale, outer, torch.float64) - a.double()).abs()
    assert bool((error <= torch.maximum(size / 5, step / 4)).all())
    want = a.double() @ b.double().T
    got = of_rows(a).double() @ rounded_weights(b, "nvfp4").double().T
    assert 1e-2 < float((got - want).norm() / want.norm()) <= 0.15
    assert 1e-2 < float((of_rows(a) - a).double().norm() / a.double().norm()) <= 0.11


def test_a_row_does_not_depend_on_others_and_two_tensors_of_a_matrix_have_their_own_scales() -> None:
    x = draws("heavy", 8, 64)
    assert torch.equal(of_rows(torch.cat((x, 1e4 * x)))[:8], of_rows(x))
    pair = torch.stack((torch.cat((x, 1e4 * x)),))
    got = rounded_weights(pair, "nvfp4", tensors=2)
    assert torch.equal(got[0, :8], rounded_weights(x, "nvfp4"))
    assert torch.equal(got[0, 8:], rounded_weights(1e4 * x, "nvfp4"))
