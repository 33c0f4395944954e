"""Compares kernels with their targets on a GPU; without a GPU, their results with float64 in Triton's interpreter.

    python -m benchmarks.kernels [part ...]

On a GPU: ratios to the library's best at the same shapes, taken in interleaved pairs, and bit-invariance over the
number of rows from 1 to 4,096 (`kernels_gpu`). Elsewhere every speed is `null` and unmeasured. In both cases the small
shapes of `tests/kernels/interpreted.py` are compared with float64.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.conditions import Figures, Target, arguments, at_least, at_most, cannot_run, finish
from headrace.parent_death import ending_with_parent

ROOT = Path(__file__).resolve().parents[1]
TARGETS: dict[str, tuple[Callable[[float | None, float], Target], float]] = {
    "matmul_over_cublas": (at_least, 0.75),
    "matmul_64_rows_over_cublas": (at_least, 0.6),
    "attention_prefill_over_cudnn": (at_least, 0.6),
    "attention_decode_over_copy": (at_least, 0.65),
    "rms_norm_over_copy": (at_least, 0.85),
    "quantise_over_copy": (at_least, 0.85),
    "selected_logprob_over_head_time": (at_most, 1.35),
    "selected_logprob_backward_over_unfused_time": (at_most, 1.5),
    "selected_logprob_memory_share": (at_most, 0.01),
    "permute_over_copy": (at_least, 0.7),
    "unpermute_over_copy": (at_least, 0.7),
    "delta_encode_over_copy": (at_least, 0.75),
    "delta_apply_over_copy": (at_least, 0.7),
}
"""Targets: ratios of speed, except for the names with time or share. Each is of a kernel that the product calls."""


def checked(gpu: bool, names: Sequence[str]) -> Figures:
    """Each kernel against float64 on small shapes, in a process of its own: the mode is chosen at import."""
    from tests.kernels import interpreted

    out: Figures = {}
    mode = {"TRITON_INTERPRET": "0" if gpu else "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ending_with_parent([sys.executable, "-m", "tests.kernels.interpreted", *names]),
        cwd=ROOT,
        env=os.environ | mode,
        capture_output=True,
        text=True,
    )
    for kernel in names or interpreted.KERNELS:
        out[f"{kernel}_right"] = f"{kernel}: right" in done.stdout
    sys.stderr.write(done.stderr[-2000:])
    return out


def main() -> None:
    """Run the measurements that this machine supports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="kernel")
    args = arguments(parser, names=["rms_norm"])
    if find_spec("triton") is None:
        cannot_run("Triton is not installed: `pip install 'headrace[kernels]'` brings it and its interpreter")
    gpu = torch.cuda.is_available()
    figures: Figures = {"mode": "gpu" if gpu else "interpreter"}
    if gpu:
        from benchmarks.kernels_gpu import measured

        figures |= measured(args.names)
    else:
        figures |= {"gpu": None, "note": "no GPU: speeds are unmeasured; the interpreter checks indexing and masking"}
    figures |= checked(gpu, args.names if args.smoke else ())
    targets = {name: compare(figures.get(name), limit) for name, (compare, limit) in TARGETS.items()}
    finish({name: None for name in TARGETS} | figures, targets, "torch", "triton", "numpy")


if __name__ == "__main__":
    main()
