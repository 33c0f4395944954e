"""Where Triton is: on a CUDA device, or in Triton's interpreter when a test asks for it. Nowhere else is it imported.

`jit` and `tl` stand in for `triton.jit` and `triton.language`, so that a kernel can stand beside its torch twin in a
file that is also read where there is no Triton. Interpreted kernels upcast the operands of `tl.dot`: the interpreter
multiplies bfloat16 wrongly and truncates when it casts to it (seen in Triton 3.7.1).
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())

tl: Any = None
if AVAILABLE:
    import triton

    tl = importlib.import_module("triton.language")


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit` where there is Triton; elsewhere a function that nobody can launch."""
    return triton.jit(function) if AVAILABLE else function


def tiles(size: int, tile: int) -> int:
    """Tiles that cover `size`."""
    return -(-size // tile)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`, as Triton wants block sizes."""
    return 1 << max(0, size - 1).bit_length()
