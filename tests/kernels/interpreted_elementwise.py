"""The operations between the products, in Triton, against float64."""

import torch

from headrace.kernels import batch_invariant, dispatch
from headrace.kernels.elementwise import norm
from headrace.kernels.elementwise.norm import rms_norm_backward_triton
from headrace.kernels.elementwise.rotary import rotate_triton
from headrace.kernels.elementwise.swiglu import swiglu_backward_triton, swiglu_triton
from tests.kernels.cases import shapes
from tests.kernels.interpreted_attention import DTYPES


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(torch.get_default_device()).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # The interpreter truncates where a GPU rounds to bfloat16, so one unit of the last place is allowed.
    unit = 2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-20
    assert got.shape == want.shape and bool(((got.double() - want).abs() <= unit * (want.abs() + 0.25)).all())


def rotate() -> None:
    for dtype, _ in DTYPES:
        for heads, half, rest in shapes((3, 12, 8), (4, 8, 0), (1, 32, 0)):
            x, angle = drawn(5, heads, 2 * half + rest, dtype=dtype), drawn(5, 1, half, dtype=dtype)
            cos, sin = angle.cos(), angle.sin()
            for back in (False, True):
                want = batch_invariant.rotate_forward(x.double(), cos.double(), sin.double() * (-1 if back else 1))
                close(rotate_triton(x, cos, sin, back), want)
            whole = rotate_triton(x, cos, sin, False)
            assert torch.equal(rotate_triton(x[2:3], cos[2:3], sin[2:3], False), whole[2:3])


def swiglu() -> None:
    for dtype, _ in DTYPES:
        for rows, width in shapes((5, 24), (3, 2100), (1, 8)):
            x, grad = 4 * drawn(rows, 2 * width, dtype=dtype), drawn(rows, width, dtype=dtype)
            leaf = x.double().requires_grad_()
            gate, up = leaf.chunk(2, -1)
            want = torch.nn.functional.silu(gate) * up
            got = swiglu_triton(x)
            close(got, want.detach())
            close(swiglu_backward_triton(x, grad), torch.autograd.grad(want, leaf, grad.double())[0])
            assert torch.equal(swiglu_triton(x[-1:]), got[-1:])


def norm_gradient() -> None:
    if dispatch.INTERPRETED:
        norm.PARTS = 5  # the interpreter runs each program, also those without a row
    for dtype, bound in DTYPES:
        for shape in shapes((70, 24), (9, 3, 16), (0, 8)):
            x, grad, weight = (drawn(*s, dtype=dtype) for s in (shape, shape, shape[1:]))
            leaves = x.double().requires_grad_(), weight.double().requires_grad_()
            scale = torch.rsqrt(leaves[0].pow(2).mean(-1, keepdim=True) + 1e-6)
            want = torch.autograd.grad(leaves[0] * scale * leaves[1], leaves, grad.double())
            got = rms_norm_backward_triton(grad, x, weight, scale.detach().float())
            assert all(a.shape == b.shape and a.dtype == dtype for a, b in zip(got, want, strict=True))
            if x.numel():
                assert all(
                    float((a.double() - b).norm() / b.norm()) <= bound for a, b in zip(got, want, strict=True)
                ), shape
            again = rms_norm_backward_triton(grad, x, weight, scale.detach().float())
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


KERNELS = {"rotate": rotate, "swiglu": swiglu, "rms_norm_backward": norm_gradient}
