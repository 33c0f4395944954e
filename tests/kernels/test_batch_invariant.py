"""Row functions: a row's bits do not depend on the rows beside it, and gradients are those of plain torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels import batch_invariant

torch.set_num_threads(1)

WEIGHT = torch.linspace(0.5, 1.5, 83)
COS, SIN = torch.rand(300, 1, 21), torch.rand(300, 1, 21)
CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rms_norm": (
        (300, 83),
        lambda x: batch_invariant.rms_norm(x, WEIGHT.to(x.dtype), 1e-6),
        lambda x: torch.nn.functional.rms_norm(x, (83,), WEIGHT.to(x.dtype), 1e-6),
    ),
    "swiglu": (
        (300, 166),
        batch_invariant.swiglu,
        lambda x: torch.nn.functional.silu(x[:, :83]) * x[:, 83:],
    ),
    "rotate": (
        (300, 2, 42),
        lambda x: batch_invariant.rotate(x, COS[: len(x)].to(x.dtype), SIN[: len(x)].to(x.dtype)),
        lambda x: (
            x * torch.cat((COS, COS), -1) + torch.cat((-x[..., 21:], x[..., :21]), -1) * torch.cat((SIN, SIN), -1)
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_see_each_other(name: str, dtype: torch.dtype) -> None:
    shape, function, _ = CASES[name]
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    whole = function(x)
    assert whole.dtype == dtype
    for count in (1, 2, 3, 7, 16, 33, 299):
        assert torch.equal(function(x[:count]), whole[:count])


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    shape, function, plain = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    pull = torch.randn(function(x).shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(function(x), plain(x), rtol=1e-5, atol=1e-6)
    (got,) = torch.autograd.grad((function(x) * pull).sum(), x)
    (want,) = torch.autograd.grad((plain(x) * pull).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_swiglu_of_extremes_is_finite() -> None:
    x = torch.tensor([[-200.0, 200.0, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]]).requires_grad_()
    out = batch_invariant.swiglu(x)
    assert out.tolist()[0][:2] == [0.0, 200.0]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert bool(torch.isfinite(grad).all())


def test_no_rows_are_fine() -> None:
    assert batch_invariant.linear(torch.empty(0, 8), torch.empty(4, 8), True).shape == (0, 4)
