"""Scratch memory of attention on a GPU, without a GPU: the launches are left out."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels.attention import forward
from headrace.kernels.block_attention import BLOCK


class Unlaunched:
    """A kernel whose launches are noted and do nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_, **__: None


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of new tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.total += out.nbytes
        return out


def allocated(lengths: list[int]) -> tuple[int, list[tuple[int, ...]]]:
    """Bytes of a decode step of a layer of 32 heads of 128 over 8, and the grids of its first kernel."""
    pages = -(-max(lengths) // BLOCK)
    table = torch.zeros(len(lengths), pages, dtype=torch.int32)
    q, pool = torch.zeros(len(lengths), 32, 128, dtype=torch.bfloat16), torch.zeros(1, 8, BLOCK, 128).bfloat16()
    starts = [length - 1 for length in lengths]
    counted = Allocated()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch, counted:
        kernel = Unlaunched()
        patch.setattr(forward, "_split_kernel", kernel)
        patch.setattr(forward, "_merge_kernel", Unlaunched())
        forward.ragged_attention_triton(q, pool, pool, table, [1] * len(lengths), starts, 0.1, split=True)
    return counted.total, kernel.grids


def test_one_long_sequence_costs_the_others_nothing() -> None:
    together, grids = allocated([65_536] + [700] * 255)
    assert grids == [(32 + 255, 8)], "a program for each split that has keys"
    alone, _ = allocated([65_536])
    short, _ = allocated([700] * 255)
    assert together == alone + short < 8 << 20
    assert allocated([65_536] * 256)[0] < 160 << 20


def test_the_parts_of_tiles_are_the_splits_that_their_last_row_sees() -> None:
    queries = ((0, 3, 0, 0), (3, 1, 255, 9), (4, 40, 100, 18))
    listed, firsts, high = forward.parts(queries, 4, 64, 128, torch.device("cpu"))
    assert forward.tiles(queries, 4, 64, torch.device("cpu"))[:, 1].tolist() == [0, 0, 0, 64, 128]
    assert listed.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0], [3, 1], [4, 0], [4, 1]]
    assert firsts.tolist() == [0, 1, 3, 4, 6] and high == 64
    assert forward.parts(queries[:2], 4, 64, 128, torch.device("cpu")).high == 16
