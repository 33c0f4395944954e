"""Shim 3 of 3: allocates the buffer of routed experts as plain memory; SGLang would register it with a CUDA driver."""

from collections.abc import Sequence

import torch


def _plain(dims: Sequence[int], *, dtype: torch.dtype, **_: object) -> torch.Tensor:
    return torch.empty(tuple(dims), dtype=dtype)


def plug() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _plain
