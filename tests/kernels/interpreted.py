"""Triton kernels against float64, in the interpreter or on a GPU: run as a program, the mode is chosen at import.

TRITON_INTERPRET=1 python -m tests.kernels.interpreted [--quick] [kernel ...]

--quick leaves out float32, whose path through a kernel is the same without the casts, and `LONG`, whose parts run
alone, and tries two shapes of each.
"""

import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version

import torch

from headrace.kernels import dispatch, grouped_mm, mxfp8, selected_logprob
from headrace.kernels.batch_invariant import linear_triton, rms_norm_triton
from headrace.kernels.selected_logprob import selected_logprob_backward_triton, selected_logprob_triton
from tests.kernels import (
    interpreted_attention,
    interpreted_delta,
    interpreted_elementwise,
    interpreted_moe,
    interpreted_operators,
    plain,
)
from tests.kernels.cases import dtypes, shapes

# Dtypes and the relative size of one rounding: the interpreter truncates where a GPU rounds to nearest.
DTYPES = dtypes((torch.float32, 2**-23), (torch.bfloat16, 2**-7))


def matmul() -> None:
    for dtype, ulp in DTYPES:
        for m, n, k in shapes((1, 7, 64), (65, 130, 100), (33, 64, 192)):
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            got, want = linear_triton(x, w), x.double() @ w.double().T
            bound = ulp * want.abs() + k * 2**-24 * (x.double().abs() @ w.double().abs().T)
            assert got.dtype == dtype and bool(((got.double() - want).abs() <= bound).all())
        # Rows at the same place of a tile: numpy's product, unlike a GPU's, may depend on the place.
        assert torch.equal(linear_triton(x[:8], w), linear_triton(x, w)[:8])


def rms_norm() -> None:
    for dtype, ulp in DTYPES:
        for n, d in ((3, 96), (5, 100), (2, 257)):
            x, w = torch.randn(n, d).to(dtype), torch.randn(d).to(dtype)
            want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()
            error = (rms_norm_triton(x, w, 1e-6)[0].double() - want).abs()
            assert bool((error <= 4 * ulp * want.abs() + 1e-12).all())


def selected() -> None:
    """Over several parts of the vocabulary."""
    selected_logprob.PART = 256
    for dtype, _ in DTYPES:
        for m, v, d in shapes((1, 130, 64), (40, 257, 100), (33, 128, 192)):
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


def backward() -> None:
    """Against autograd in float64, over several slices of the vocabulary."""
    selected_logprob.SLICE = 128
    for dtype, ulp in DTYPES:
        for m, v, d in shapes((1, 130, 64), (40, 257, 100), (33, 128, 72)):
            h, w = torch.randn(m, d).to(dtype), (torch.randn(v, d) * 0.3).to(dtype)
            targets, heat, grad = torch.randint(0, v, (m,)), torch.rand(m) + 0.5, torch.randn(m)
            _, _, lse = selected_logprob_triton(h, w, targets, heat)
            got = selected_logprob_backward_triton(grad, h, w, targets, heat, lse)
            h64, w64 = h.double().requires_grad_(), w.double().requires_grad_()
            logp = torch.log_softmax(h64 @ w64.T / heat.double()[:, None], -1).gather(1, targets[:, None])[:, 0]
            for a, b in zip(got, torch.autograd.grad((logp * grad).sum(), (h64, w64)), strict=True):
                assert a.dtype == dtype
                assert float((a.double() - b).norm() / b.norm()) <= 4 * ulp + 1e-5


def quantisers() -> None:
    """The twin's bytes: scales and elements, ties, subnormals, huge and tiny blocks; and the numbers they mean."""
    for dtype in dtypes(torch.float32, torch.bfloat16):
        for m, k in shapes((64, 96), (33, 160), (1, 32), (96, 320)):
            x = (torch.randn(m, k) * torch.exp2(torch.randint(-30, 30, (m, 1)).float())).to(dtype)
            x[:, ::5] *= 2.0**-9  # down to where the grid is even and below
            x[0, : min(k, 32)] = torch.linspace(-448, 448, 32)[: min(k, 32)].to(dtype)
            q, s = mxfp8.quantise_triton(x)
            want, scale = mxfp8.quantise(x)
            assert torch.equal(s, scale) and torch.equal(q.view(torch.uint8), want.view(torch.uint8))
            for wide in dtypes(torch.float32, torch.bfloat16):
                assert torch.equal(mxfp8.dequantise_triton(q, s, wide), mxfp8.dequantise(q, s, wide))
            if m > 1:
                s[0, 0] = 255
                assert torch.equal(
                    mxfp8.dequantise_triton(q, s, dtype).isnan(), mxfp8.dequantise(q, s, dtype).isnan()
                ), "a block that was not finite stays so"
    ties = torch.arange(0, 448, 0.5)[: 27 * 32].view(27, 32) + 0.25
    assert torch.equal(mxfp8.quantise_triton(ties)[0].float(), mxfp8.quantise(ties)[0].float())


def grouped() -> None:
    """Ragged and empty groups against float64."""
    for ends, n, k in shapes(([5, 5, 70], 96, 64), ([5, 5, 40], 128, 256), ([0, 33, 33, 40], 40, 160), ([1], 64, 32)):
        experts, rows = len(ends), ends[-1]
        for dtype, ulp in DTYPES:
            x, w = torch.randn(rows, k).to(dtype), (torch.randn(experts, n, k) * 0.2).to(dtype)
            g = torch.randn(rows, n).to(dtype)
            a, b, c = x.double(), w.double(), g.double()
            close(grouped_mm.grouped_mm_triton(x, w, ends, dtype), plain.grouped_mm(a, b, ends), ulp)
            close(grouped_mm.grouped_dgrad_triton(g, w, ends, dtype), plain.grouped_dgrad(c, b, ends), ulp)
            close(grouped_mm.grouped_wgrad_triton(g, x, ends, dtype), plain.grouped_wgrad(c, a, ends), ulp)
        if rows > 4 and (rows <= 32 * experts or not dispatch.INTERPRETED):  # the interpreter's product knows its tiles
            few, many = [2] * experts, grouped_mm.grouped_mm_triton(x, w, [rows] * experts, dtype)
            assert torch.equal(grouped_mm.grouped_mm_triton(x[:2], w, few, dtype), many[:2]), "a group's size shows"


def close(got: torch.Tensor, want: torch.Tensor, ulp: float) -> None:
    assert got.shape == want.shape
    scale = float(want.abs().max()) if want.numel() else 0.0
    assert bool(((got.double() - want).abs() <= ulp * want.abs() + 1e-5 * scale + 1e-12).all())


KERNELS: dict[str, Callable[[], None]] = {
    "matmul": matmul,
    "rms_norm": rms_norm,
    "selected": selected,
    "backward": backward,
    "quantisers": quantisers,
    "grouped": grouped,
    **interpreted_attention.KERNELS,
    **interpreted_moe.KERNELS,
    **interpreted_delta.KERNELS,
    **interpreted_elementwise.KERNELS,
    **interpreted_operators.KERNELS,
}

LONG = ("experts", "frozen", "experts_block_scaled")
"""The experts' whole passes. Without them, `operators` runs each operator of experts once."""

if __name__ == "__main__":
    if not dispatch.AVAILABLE:
        sys.exit("no Triton, or neither a GPU nor TRITON_INTERPRET=1")
    if not dispatch.INTERPRETED:
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    names = [name for name in sys.argv[1:] if name != "--quick"]
    quick = len(names) < len(sys.argv) - 1
    wrong = []
    for name in names or [name for name in KERNELS if not quick or name not in LONG]:
        began = time.process_time()
        try:
            KERNELS[name]()
        except Exception:
            wrong.append(name)
            print(f"{name}: wrong", flush=True)
            traceback.print_exc()
            continue
        print(f"{name}: right, {time.process_time() - began:.1f} s", flush=True)
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "numpy")))
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")
