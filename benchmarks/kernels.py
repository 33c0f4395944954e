"""Kernels against their targets on a GPU; without one, their results against float64 in Triton's interpreter.

    python -m benchmarks.kernels

On a GPU: ratios to the library's best at the same shapes, taken in interleaved pairs (docs/kernels.md names the
targets), correctness against float64, and bit-invariance over the number of rows from 1 to 4,096. Elsewhere every
speed is `null` and unmeasured, and the small shapes of `tests/kernels/interpreted.py` are run instead.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import Figures, at_least, at_most, cannot_run, finish

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("matmul", "rms_norm", "selected", "backward", "quantisers", "grouped")
TARGETS: dict[str, tuple[Callable[[float | None, float], Figures], float]] = {
    "matmul_over_cublas": (at_least, 0.75),
    "quantise_over_copy": (at_least, 0.85),
    "grouped_mx_over_bf16_compute_bound": (at_least, 0.6),
    "grouped_mx_over_bf16_32_rows": (at_least, 1.3),
    "selected_logprob_over_head_time": (at_most, 1.35),
    "selected_logprob_memory_share": (at_most, 0.01),
}
"""Speed-ups are time of theirs over time of ours."""
COUNTS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 129, 511, 1024, 2000, 4096)


def paired(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 20) -> float:
    """Best time of theirs over best time of ours, taking turns."""
    best = [float("inf"), float("inf")]
    for work in (ours, theirs):
        work()
    for _ in range(rounds):
        for place, work in enumerate((ours, theirs)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            best[place] = min(best[place], time.perf_counter() - began)
    return best[1] / best[0]


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the error over the norm of what is right."""
    return float((got.double() - want).norm() / want.norm())


def on_gpu() -> Figures:
    """Ratios, errors, invariance."""
    from headrace.kernels import grouped_mm, mxfp8
    from headrace.kernels.batch_invariant import linear_triton
    from headrace.kernels.grouped_mm import Mx
    from headrace.kernels.selected_logprob import selected_logprob_triton

    out: Figures = {"gpu": torch.cuda.get_device_name()}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    a, b = draw(4096, 4096), draw(4096, 4096)
    out["matmul_over_cublas"] = paired(lambda: linear_triton(a, b), lambda: a @ b.T)
    whole = linear_triton(a, b)
    out["matmul_relative_error"] = relative(whole[:64], a[:64].double() @ b.double().T)
    out["matmul_invariant"] = all(torch.equal(linear_triton(a[:m], b), whole[:m]) for m in COUNTS)

    target = torch.empty_like(a)  # a copy moves 4 bytes a number, a quantiser 3.03
    out["quantise_over_copy"] = paired(lambda: mxfp8.quantise_triton(a), lambda: target.copy_(a)) * 3.03 / 4
    q, s = mxfp8.quantise_triton(a)
    want_q, want_s = mxfp8.quantise(a.cpu())
    out["quantise_bytes_equal"] = torch.equal(q.cpu().view(torch.uint8), want_q.view(torch.uint8)) and torch.equal(
        s.cpu(), want_s
    )

    experts, n, k = 16, 2048, 2048
    w = draw(experts, n, k)
    mw = Mx(*(part.view(experts, n, -1) for part in mxfp8.quantise_triton(w.view(-1, k))))
    for name, rows in (("compute_bound", 1024), ("32_rows", 32)):
        x = draw(experts * rows, k)
        mx = Mx(*mxfp8.quantise_triton(x))
        ends = [rows * (e + 1) for e in range(experts)]
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        turned = w.transpose(1, 2)

        def mine(mx: Mx = mx, ends: list[int] = ends) -> Tensor:
            return grouped_mm.grouped_mm_triton(mx, mw, ends, torch.bfloat16)

        def library(x: Tensor = x, offsets: Tensor = offsets, turned: Tensor = turned) -> Tensor:
            return torch._grouped_mm(x, turned, offs=offsets)

        out[f"grouped_mx_over_bf16_{name}"] = paired(mine, library)
    out["grouped_relative_error"] = relative(mine(), grouped_mm.grouped_mm(mx, mw, ends, torch.float64))

    h, head = draw(4096, 2048), draw(151_936, 2048)
    ids = torch.randint(0, len(head), (4096,), device="cuda")
    out["selected_logprob_over_head_time"] = 1 / paired(
        lambda: selected_logprob_triton(h, head, ids, 1.0), lambda: h @ head.T, rounds=5
    )
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    logp, _, _ = selected_logprob_triton(h, head, ids, 1.0)
    share = (torch.cuda.max_memory_allocated() - held) / (len(h) * len(head) * 4)
    out["selected_logprob_memory_share"] = share
    full = torch.log_softmax(h[:32].double() @ head.double().T, -1).gather(1, ids[:32, None])[:, 0]
    out["selected_logprob_max_error"] = float((logp[:32].double() - full).abs().max())
    out["selected_logprob_invariant"] = all(
        torch.equal(selected_logprob_triton(h[:m], head, ids[:m], 1.0)[0], logp[:m]) for m in COUNTS
    )
    return out


def interpreted() -> Figures:
    """Each kernel against float64 on small shapes, in a process of its own: the mode is chosen at import."""
    if importlib.util.find_spec("triton") is None:
        cannot_run("no GPU, and Triton is not installed: `pip install 'headrace[kernels]'` brings the interpreter")
    out: Figures = {"gpu": None, "note": "no GPU: speeds are unmeasured; the interpreter checks indexing and masking"}
    for kernel in KERNELS:
        done = subprocess.run(
            [sys.executable, "-m", "tests.kernels.interpreted", kernel],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        out[f"{kernel}_right_in_interpreter"] = done.returncode == 0
        if done.returncode:
            sys.stderr.write(done.stderr[-2000:])
    return out


def main() -> None:
    """Measure what this machine can."""
    figures = on_gpu() if torch.cuda.is_available() else interpreted()
    targets = {name: compare(figures.get(name), limit) for name, (compare, limit) in TARGETS.items()}
    finish({name: None for name in TARGETS} | figures, targets, "torch", "triton", "numpy")


if __name__ == "__main__":
    main()
