"""Triton kernels against float64, in the interpreter: indexing and masking, not speed and not a GPU's arithmetic."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels import dispatch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (the extra `kernels`) is not installed")
@pytest.mark.parametrize("kernel", ["matmul", "rms_norm", "selected", "backward", "quantisers", "grouped"])
def test_a_kernel_computes_what_its_twin_does(kernel: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", kernel],
        check=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )


def test_block_sizes() -> None:
    assert [dispatch.power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert [dispatch.tiles(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
