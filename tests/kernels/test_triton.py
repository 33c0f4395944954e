"""Triton kernels against float64, in the interpreter: indexing and masking, not speed and not a GPU's arithmetic."""

import importlib.util
import os
import subprocess
import sys

import pytest

from headrace.kernels import dispatch
from tests.support.paths import ROOT


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (the extra `kernels`) is not installed")
@pytest.mark.parametrize("options", [["--quick"], pytest.param([], marks=pytest.mark.slow)], ids=["quick", "all"])
def test_kernels_compute_what_their_twins_do(options: list[str]) -> None:
    """All of `tests.kernels.interpreted` in one process; `make test-kernels` does it on two pairs of versions."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", *options],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    assert done.stdout.count(": right,") >= 15 and "triton 3." in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (the extra `kernels`) is not installed")
def test_every_kernel_runs_on_the_device_of_its_operands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.launches"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    assert done.stdout == "[('_forward_kernel', 1), ('_forward_kernel', 0)]\n"


@pytest.mark.gpu
def test_kernels_compute_what_their_twins_do_on_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.kernels.interpreted"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"


def test_a_gpu_with_too_little_shared_memory_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"Tesla T4 gives a program 65,536 bytes .* need 101,376; take a GPU"):
        dispatch.large_enough("Tesla T4", dispatch.Chip(7, 65_536))
    assert dispatch.large_enough("NVIDIA L40S", dispatch.ADA) == dispatch.ADA


def test_block_sizes() -> None:
    assert [dispatch.power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert [dispatch.tiles(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
