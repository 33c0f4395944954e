"""The delta's Triton kernels in the interpreter against their twins: run as a program, the mode is chosen at import."""

import numpy as np
import torch

from headrace.kernels import delta, dispatch


def check() -> None:
    rng = np.random.default_rng(1)
    for kind in (np.uint8, np.int16, np.int32):
        bits = np.iinfo(kind)
        for count in (1, delta.BLOCK, 2 * delta.BLOCK + 7):
            for share in (0.0, 0.01, 1.0):
                old = rng.integers(bits.min, bits.max, count, dtype=kind, endpoint=True)
                other = rng.integers(bits.min, bits.max, count, dtype=kind, endpoint=True)
                new = np.where(rng.random(count) < share, other, old)
                a, b = torch.from_numpy(old), torch.from_numpy(new)
                at, folded = delta.changes_triton(a, b)
                want_at, want_folded = delta.changes(a, b)
                assert torch.equal(at, want_at) and torch.equal(folded, want_folded), (kind, count, share)
                assert torch.equal(delta.apply_triton(a, at, folded), b), (kind, count, share)


if __name__ == "__main__":
    assert dispatch.AVAILABLE and dispatch.INTERPRETED
    check()
