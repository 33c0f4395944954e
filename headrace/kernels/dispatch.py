"""Imports Triton where it can run: on a CUDA device, or in its interpreter where TRITON_INTERPRET is 1.

No other module imports it. `jit` and `tl` replace `triton.jit` and `triton.language`, so that a kernel and its torch
twin share a file that can be imported without Triton. Interpreted kernels convert the operands of `tl.dot` to float32:
the interpreter multiplies bfloat16 wrongly and truncates when it casts to it (seen in Triton 3.7.1).
"""

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())

tl: Any = None
if AVAILABLE:
    import triton

    tl = importlib.import_module("triton.language")


if AVAILABLE and not INTERPRETED:
    _Base: Any = triton.JITFunction

    class _Kernel(_Base):  # type: ignore[misc]
        """A kernel that runs on the device of its first tensor: Triton itself takes the thread's current device, which
        is the first GPU in a thread that has chosen none."""

        def run(self, *args: Any, **options: Any) -> Any:
            if STANDING.gpu:
                return None
            device = next((x.device for x in args if isinstance(x, Tensor)), None)
            if device is None or device.type != "cuda":
                return super().run(*args, **options)
            with torch.cuda.device(device):
                return super().run(*args, **options)


class _Standing(threading.local):
    """The meaning of tensors in this thread."""

    gpu = False
    """Tensors on the CPU stand for a GPU's."""
    counted = False
    """Tensors have no values: `training.planned` counts their bytes."""


STANDING = _Standing()


class _Absent:
    """A kernel where Triton cannot run."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launch, which does nothing where memory is counted."""
        if not STANDING.gpu:
            raise RuntimeError("Triton is not there: a CUDA device, or TRITON_INTERPRET=1, is needed")
        return lambda *_, **__: None


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit` where Triton can run, launched on its operands' device; elsewhere a kernel that
    cannot be launched."""
    if not AVAILABLE:
        return _Absent(function)
    return triton.jit(function) if INTERPRETED else _Kernel(function)


OPERATORS_ON_CPU = False
"""Send CPU tensors through `torch.ops` as well: tests/kernels/test_operators.py compares the bits of both ways."""


Step = TypeVar("Step")


def repeated(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps of a loop whose later ones allocate no more than its first two. Where bytes are counted, those two and
    the last."""
    return [*steps[:2], steps[-1]] if STANDING.counted and len(steps) > 2 else steps


def on_gpu(x: Tensor) -> bool:
    """Whether an operation on x is a GPU's."""
    return x.is_cuda or STANDING.gpu


def twin(x: Tensor) -> bool:
    """Whether an operation on x is the torch twin, called directly; else it is an operator of `torch.ops.headrace`.

    On a CPU the dispatcher leads to the same function, and a decode step of a small model makes a hundred calls: with
    it, sampling at batch 1 took a third longer or more.
    """
    return x.is_cpu and not (OPERATORS_ON_CPU or STANDING.gpu)


class Chip(NamedTuple):
    """A GPU, as the choice of tiles sees it: one chip has one choice, so its sampler and its trainer share bits."""

    major: int
    """Major compute capability."""
    shared_bytes: int
    """Shared memory that a program may use."""


HOPPER, ADA = Chip(9, 227 * 1024), Chip(8, 99 * 1024)
"""H100 and H200; L40S and RTX 4090. B200 has the shared memory of the first, other RTX cards that of the second."""


def chip(device: torch.device) -> Chip:
    """The chip of a CUDA device; Hopper for the interpreter. RuntimeError if no tiles fit its shared memory."""
    return _chip_of(device) if device.type == "cuda" else HOPPER


@functools.cache
def _chip_of(device: torch.device) -> Chip:
    index = torch.cuda.current_device() if device.index is None else device.index
    limit = importlib.import_module("triton.runtime").driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return large_enough(torch.cuda.get_device_name(index), Chip(torch.cuda.get_device_capability(index)[0], limit))


def large_enough(name: str, found: Chip) -> Chip:
    """The chip. RuntimeError if it has less shared memory than the smallest tiles need."""
    if found.shared_bytes < ADA.shared_bytes:
        raise RuntimeError(
            f"{name} gives a program {found.shared_bytes:,} bytes of shared memory, and headrace's kernels need "
            f"{ADA.shared_bytes:,}; take a GPU that has them (A100, L40S, RTX 30 and later), or device cpu"
        )
    return found


def tiles(size: int, tile: int) -> int:
    """The number of tiles of `tile` elements that cover `size` elements."""
    return -(-size // tile)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`, as Triton wants block sizes."""
    return 1 << max(0, size - 1).bit_length()
