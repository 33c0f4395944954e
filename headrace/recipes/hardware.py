"""Divides the GPUs between trainer and sampler, and finds the trainer's cheapest layout that fits by the measured
plan."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headrace.policy.adapters import shape
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import file_bytes
from headrace.recipes.wanted import InitError, Wanted
from headrace.training import memory_plan
from headrace.training.memory_plan import GIB, Layout, MemoryPlan

USABLE = 0.98
"""Share of a GPU's named memory that the driver leaves to programs."""
WEIGHTS = 0.5
"""Share of a sampler's GPUs that weights take at most: the rest is for keys and values."""
CACHE = 0.2
"""`engine.cache_share` where trainer and sampler share a GPU."""
RANK = 32
"""Rank of adapters where all weights do not fit."""


class Division(NamedTuple):
    """The GPUs of trainer and sampler, and the trainer's layout."""

    trainer: int
    """GPUs of the trainer."""
    servers: tuple[str, ...]
    """The GPUs of each server, as `engine.options.server_devices`."""
    split: int
    """GPUs of a server."""
    layout: Layout
    memory: MemoryPlan
    rank: int = 0
    """Of adapters; 0: all weights are trained."""


def divide(wanted: Wanted, policy: PolicyConfig, base: Layout) -> Division:
    """The division of the GPUs for a policy. base: what does not depend on it. InitError where nothing fits."""
    available = int(USABLE * wanted.gib * GIB)
    if wanted.gpus * wanted.nodes == 1:
        return _shared(policy, base, available)
    split = next((n for n in (1, 2, 4, 8) if file_bytes(policy) / n <= WEIGHTS * available), 0)
    for ranks, free in _splits(wanted, split):
        if layout := memory_plan.fitting(policy, base._replace(devices=ranks), available):
            servers = tuple(
                ",".join(str(each) for each in free[n : n + split]) for n in range(0, len(free) - split + 1, split)
            )
            return Division(ranks, servers, split, layout, memory_plan.plan(policy, layout))
    raise InitError(
        f"no layout of {wanted.nodes} x {wanted.gpus} GPUs of {wanted.gib:g} GiB holds trainer and sampler of this "
        "model: give more GPUs, or a smaller --context (`headrace trainer plan` shows what a layout needs)"
    )


def _splits(wanted: Wanted, split: int) -> Iterator[tuple[int, list[int]]]:
    """Ranks of the trainer and the GPUs left for servers: half and half first, since each waits for the other."""
    if not split:
        return
    if wanted.nodes == 2:
        if wanted.gpus >= split:
            yield wanted.gpus, list(range(wanted.gpus))
        return
    for ranks in range(max(1, wanted.gpus // 2), wanted.gpus - split + 1):
        yield ranks, list(range(ranks, wanted.gpus))


def _shared(policy: PolicyConfig, base: Layout, available: int) -> Division:
    """Trainer and embedded engine on one GPU: all weights if they fit, else adapters."""
    for rank in (0,) if policy.source else (0, RANK):
        tried = msgspec.structs.replace(policy, adapter=shape.resolved(policy, rank, 32.0, ())) if rank else policy
        left = available - 2 * file_bytes(tried) - int(CACHE * available / USABLE)
        layout = memory_plan.fitting(tried, base, left) if left > 0 else None
        if layout and not layout.offload:  # on one GPU adapters train faster than an optimizer in the host's memory
            return Division(1, (), 1, layout, memory_plan.plan(tried, layout), rank)
    raise InitError(
        "one GPU does not hold trainer and sampler of this model, not even with adapters: give more GPUs, or a smaller "
        "--context"
    )
