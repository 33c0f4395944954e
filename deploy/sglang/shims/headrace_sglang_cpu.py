"""Shim 3 of 3: plain memory for the buffer of routed experts, which SGLang would register with a CUDA driver, and for
what its LoRA backend pins, which needs such a driver too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _plain(dims: Sequence[int], *, dtype: torch.dtype, **_: object) -> torch.Tensor:
    return torch.empty(tuple(dims), dtype=dtype)


def plug() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _plain
    if not torch.cuda.is_available():
        for name in ("tensor", "empty", "zeros", "ones"):
            setattr(torch, name, _unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*args, **named)

    return made
