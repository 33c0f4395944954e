"""A BLAS whose rows have other bits by their number, as oneDNN's on a processor with AMX: few rows, and 640 to 896."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels import heights

FEW, ODD = 16, range(640, 897)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The heights are searched again, now and after the test."""
    heights._found.cache_clear()
    yield
    heights._found.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Take the place of torch's products; the result gets the heights that are computed."""
    seen: set[int] = set()

    def like(real: Callable[..., Tensor], axis: int) -> Callable[..., Tensor]:
        def product(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
            made = real(x, y) if out is None else real(x, y, out=out)
            rows = x.shape[axis]
            seen.add(rows)
            if rows <= FEW or rows in ODD:
                with torch.no_grad():
                    made.copy_(torch.nextafter(made, torch.full_like(made, 1e9 if rows <= FEW else -1e9)))
            return made

        return product

    monkeypatch.setattr(torch, "mm", like(torch.mm, 0))
    monkeypatch.setattr(torch, "bmm", like(torch.bmm, 1))
    return seen
