"""Blocks of 32 with a power of two: exact scales, bounded error, really quantised, and a row does not depend on other
rows."""

import pytest
import torch
from torch import Tensor

from headrace.kernels import mxfp8
from headrace.kernels.expert_mlp import expert_mlp
from headrace.kernels.operators import cast as cast_of
from headrace.kernels.operators import rounded, rounded_weights


def draws(kind: str, rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    if kind == "heavy":
        x = x / (torch.randn(rows, width, 3, generator=generator).square().mean(-1)).sqrt()
    if kind == "outliers":
        x[:, ::37] *= 50
    return x.to(torch.bfloat16).float()


def test_scales_are_the_smallest_power_under_which_the_block_fits() -> None:
    amax = torch.tensor([448.0, 448.0001, 447.9, 224.0, 224.001, 1.0, 1e-30, 3e38, 0.0])
    e = mxfp8.exponents(amax).double() - 127
    assert e.tolist()[:6] == [0.0, 1.0, 0.0, -1.0, 0.0, -8.0]
    assert bool((amax[:8].double() <= 448 * 2.0 ** e[:8]).all())
    assert bool((amax[:6].double() > 448 * 2.0 ** (e[:6] - 1)).all())
    assert mxfp8.exponents(torch.tensor([torch.inf, torch.nan])).tolist() == [255, 255]


def test_what_is_not_finite_shows_and_zero_stays() -> None:
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 40] = torch.nan, -5.0
    back = rounded(x)
    assert bool(back[0, :32].isnan().all()) and back[1, 40] == -5.0 and int((back[1] != 0).sum()) == 1
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp8.quantise(torch.zeros(2, 40))


def test_no_rows_are_rounded_to_no_rows() -> None:
    """An expert's process may get none."""
    q, scale = mxfp8.quantise(torch.zeros(0, 96))
    assert (q.shape, scale.shape) == ((0, 96), (0, 3))
    assert rounded(torch.zeros(0, 96)).shape == (0, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widening_is_exact_and_a_second_time_changes_nothing(dtype: torch.dtype) -> None:
    x = draws("heavy", 64, 96).to(dtype)
    q, s = mxfp8.quantise(x)
    assert (q.dtype, s.dtype, q.shape, s.shape) == (torch.float8_e4m3fn, torch.uint8, (64, 96), (64, 3))
    once = mxfp8.dequantise(q, s, dtype)
    assert torch.equal(once.double(), mxfp8.dequantise(q, s, torch.float32).double())
    assert torch.equal(rounded(once), once)
    again = mxfp8.quantise(once)
    third = mxfp8.quantise(mxfp8.dequantise(*again, dtype))
    assert torch.equal(again[0].view(torch.uint8), third[0].view(torch.uint8)) and torch.equal(again[1], third[1])


@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers"])
@pytest.mark.parametrize("width", [128, 1024])
def test_a_products_error_is_that_of_eight_bits(kind: str, width: int) -> None:
    a, b = draws(kind, 128, width), draws(kind, 128, width, seed=1)
    want = a.double() @ b.double().T
    got = rounded(a).double() @ rounded(b).double().T
    error = float((got - want).norm() / want.norm())
    assert 1e-3 < error <= 4.0e-2
    element = float((rounded(a) - a).double().norm() / a.double().norm())
    assert 1e-3 < element <= 3.0e-2


@pytest.mark.parametrize("grid", ["mxfp8", "nvfp4"])
def test_experts_under_a_cast_have_the_gradient_of_what_they_multiplied(grid: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 32, generator=generator).requires_grad_()
    gate_up = rounded_weights(torch.randn(5, 64, 32, generator=generator), grid, 2).requires_grad_()
    down = rounded_weights(torch.randn(5, 32, 32, generator=generator), grid).requires_grad_()
    experts = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(40)])
    gates = torch.rand(40, 2, generator=generator).requires_grad_()

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: Tensor) -> Tensor:
            return rounded(value, grid)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad

    def cast(value: Tensor) -> Tensor:
        out: Tensor = Through.apply(value)  # type: ignore[no-untyped-call]
        return out

    out = expert_mlp(x, gates, experts, gate_up, down, True, cast_of(grid))
    assert not torch.allclose(out, expert_mlp(x, gates, experts, gate_up, down, True), rtol=1e-3)
    every = torch.einsum("nd,eid->nei", cast(x), gate_up)
    inner = cast(torch.nn.functional.silu(every[..., :32]) * every[..., 32:])
    outer = torch.einsum("nei,edi->ned", inner, down).gather(1, experts[..., None].expand(-1, -1, 32))
    plain = (outer * gates[..., None]).sum(1)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-3)
    leaves = (x, gates, gate_up, down)
    mine = torch.autograd.grad(out.square().sum(), leaves)
    for a, b in zip(mine, torch.autograd.grad(plain.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=float(b.abs().max()) * 1e-4)
