"""The delta's torch twin says what the CPU's codec says; that the Triton kernels do too is `interpreted_delta`'s."""

from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernels import delta
from headrace.weights.codecs import ulp_delta

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
    at, zigzagged = delta.changes(a, b)
    want, before, after = ulp_delta.changes([old], [new])
    assert np.array_equal(at.numpy(), want)
    assert np.array_equal(
        zigzagged.numpy().astype(np.uint32).astype(codec_kind), ulp_delta.zigzag_difference(before, after)
    )
    assert torch.equal(delta.apply(a, at, zigzagged), b)


def test_every_pattern_of_bits_comes_back() -> None:
    """All 65,536 bfloat16 patterns, payloads of NaN, -0.0 and denormals among them, to any other and back."""
    old = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    weights = old.view(torch.bfloat16)
    assert int(weights.isnan().sum()) == 2 * 127 and bool((weights == 0).sum() == 2)
    for new in (old.flip(0), old.roll(1), old.roll(12345), (old ^ -32768), torch.zeros_like(old)):
        at, zigzagged = delta.changes(old, new)
        assert torch.equal(at, (old != new).nonzero()[:, 0]), (
            "bits are compared, not numbers: NaN is itself, -0 is not 0"
        )
        assert torch.equal(delta.apply(old, at, zigzagged), new)
