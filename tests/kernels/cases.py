"""The cases that the kernels' checks try: all of them, or with --quick bfloat16 alone and the first two shapes."""

import sys
from typing import TypeVar

T = TypeVar("T")

# Triton's interpreter runs a program at a time: the two shapes that come first in a list are those that tell most.
QUICK = "--quick" in sys.argv


def shapes(*every: T) -> tuple[T, ...]:
    """The shapes to try, of those given."""
    return every[:2] if QUICK else every


def dtypes(*every: T) -> tuple[T, ...]:
    """The dtypes to try: float32 takes the path of bfloat16 without the casts, and stands first."""
    return every[1:] if QUICK else every
