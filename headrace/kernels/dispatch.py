"""Imports Triton where it can run: on a CUDA device, or in its interpreter where TRITON_INTERPRET is 1.

No other module imports it. `jit` and `tl` replace `triton.jit` and `triton.language`, so that a kernel and its torch
twin share a file that can be imported without Triton. Interpreted kernels convert the operands of `tl.dot` to float32:
the interpreter multiplies bfloat16 wrongly and truncates when it casts to it (seen in Triton 3.7.1).
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())

tl: Any = None
if AVAILABLE:
    import triton

    tl = importlib.import_module("triton.language")


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit` where Triton can run; elsewhere the function itself, which cannot be launched."""
    return triton.jit(function) if AVAILABLE else function


OPERATORS_ON_CPU = False
"""Send CPU tensors through `torch.ops` as well: tests/kernels/test_operators.py compares the bits of both ways."""


def twin(x: Tensor) -> bool:
    """Whether an operation on x is the torch twin, called directly; else it is an operator of `torch.ops.headrace`.

    On a CPU the dispatcher would lead to the same function, and a decode step of a small model makes a hundred calls:
    docs/kernels.md has the cost.
    """
    return x.is_cpu and not OPERATORS_ON_CPU


def tiles(size: int, tile: int) -> int:
    """The number of tiles of `tile` elements that cover `size` elements."""
    return -(-size // tile)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`, as Triton wants block sizes."""
    return 1 << max(0, size - 1).bit_length()
