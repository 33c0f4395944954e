"""The delta's kernels: the torch twin says what the CPU's codec says, and the Triton kernels say what the twin says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernels import delta
from headrace.weights import sparse

ROOT = Path(__file__).resolve().parents[2]
KINDS = ((np.uint8, np.uint8), (np.int16, np.uint16), (np.int32, np.uint32))


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: np.dtype(kinds[1]).name)
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_the_twin_is_the_codecs_own_comparison(kinds: tuple[type, type], share: float) -> None:
    rng = np.random.default_rng(3)
    torch_kind, codec_kind = kinds
    top = np.iinfo(codec_kind).max
    old: Any = rng.integers(0, top, 5000, dtype=codec_kind, endpoint=True)
    other = rng.integers(0, top, 5000, dtype=codec_kind, endpoint=True)
    new = np.where(rng.random(5000) < share, other, old)
    a, b = (torch.from_numpy(array.view(torch_kind)) for array in (old, new))
    at, folded = delta.changes(a, b)
    want, before, after = sparse.changes(old, new)
    assert np.array_equal(at.numpy(), want)
    assert np.array_equal(folded.numpy().astype(np.uint32).astype(codec_kind), sparse.fold(before, after))
    assert torch.equal(delta.apply(a, at, folded), b)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (the extra `kernels`) is not installed")
def test_the_kernels_do_what_the_twin_does() -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_delta"],
        check=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
