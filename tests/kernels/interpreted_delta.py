"""The delta's Triton kernels in the interpreter against their twins."""

from typing import Any

import numpy as np
import torch

from headrace.kernels import delta
from tests.kernels.cases import shapes


def check() -> None:
    rng = np.random.default_rng(1)
    kind: Any
    for kind in shapes(np.int16, np.int32, np.uint8):
        bits = np.iinfo(kind)
        for count in shapes(1, 2 * delta.BLOCK + 7, delta.BLOCK):
            for share in (0.0, 0.01, 1.0):
                old = rng.integers(bits.min, bits.max, count, dtype=kind, endpoint=True)
                other = rng.integers(bits.min, bits.max, count, dtype=kind, endpoint=True)
                new = np.where(rng.random(count) < share, other, old)
                a, b = (torch.from_numpy(x).to(torch.get_default_device()) for x in (old, new))
                at, zigzagged = delta.changes_triton(a, b)
                want_at, want_zigzagged = delta.changes(a, b)
                assert torch.equal(at, want_at) and torch.equal(zigzagged, want_zigzagged), (kind, count, share)
                assert torch.equal(delta.apply_triton(a, at, zigzagged), b), (kind, count, share)


def patterns() -> None:
    """Payloads of NaN, -0.0 and denormals of bfloat16: bits are moved, numbers are not looked at."""
    odd = torch.tensor([0x7FC0, 0x7F81, 0xFFC1 - 65536, -32768, 0, 1, 0x7F, 0x8001 - 65536, 0x7F80, 0xFF80 - 65536])
    old = odd.to(torch.int16).repeat(500)
    new = old.roll(1)
    at, zigzagged = delta.changes_triton(old, new)
    assert torch.equal(delta.apply_triton(old, at, zigzagged), new)
    assert all(torch.equal(a, b) for a, b in zip((at, zigzagged), delta.changes(old, new), strict=True))


KERNELS = {"delta": check, "delta_patterns": patterns}
