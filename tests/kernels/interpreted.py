"""Triton kernels in the interpreter against float64: run as a program, because the mode is chosen at import."""

import sys

import torch

from headrace.kernels import dispatch
from headrace.kernels.batch_invariant import linear_triton, rms_norm_triton
from headrace.kernels.selected_logprob import selected_logprob_triton

# Dtypes and the relative size of one rounding: the interpreter truncates where a GPU rounds to nearest.
DTYPES = ((torch.float32, 2**-23), (torch.bfloat16, 2**-7))


def matmul() -> None:
    for dtype, ulp in DTYPES:
        for m, n, k in ((1, 7, 64), (65, 130, 100), (33, 64, 192)):
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            got, want = linear_triton(x, w), x.double() @ w.double().T
            bound = ulp * want.abs() + k * 2**-24 * (x.double().abs() @ w.double().abs().T)
            assert got.dtype == dtype and bool(((got.double() - want).abs() <= bound).all())
        assert torch.equal(linear_triton(x[5:8], w), linear_triton(x, w)[5:8])


def rms_norm() -> None:
    for dtype, ulp in DTYPES:
        for n, d in ((3, 96), (5, 100), (2, 257)):
            x, w = torch.randn(n, d).to(dtype), torch.randn(d).to(dtype)
            want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()
            error = (rms_norm_triton(x, w, 1e-6).double() - want).abs()
            assert bool((error <= 4 * ulp * want.abs() + 1e-12).all())


def selected() -> None:
    for dtype, _ in DTYPES:
        for m, v, d in ((1, 130, 64), (40, 257, 100), (33, 128, 192)):
            h, w = torch.randn(m, d).to(dtype), (torch.randn(v, d) * 0.5).to(dtype)
            targets, heat = torch.randint(0, v, (m,)), torch.rand(m) + 0.5
            logp, entropy, lse = selected_logprob_triton(h, w, targets, heat)
            full = (h.double() @ w.double().T) / heat.double()[:, None]
            want = torch.log_softmax(full, -1)
            for got, expected in (
                (logp, want.gather(1, targets[:, None])[:, 0]),
                (entropy, -(want.exp() * want).sum(-1)),
                (lse, full.logsumexp(-1)),
            ):
                torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)


if __name__ == "__main__":
    assert dispatch.AVAILABLE and dispatch.INTERPRETED
    torch.manual_seed(0)
    {"matmul": matmul, "rms_norm": rms_norm, "selected": selected}[sys.argv[1]]()
