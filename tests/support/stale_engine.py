"""An engine that answers as if it had loaded a later version, and samples with the first one."""

from typing import Any

import msgspec

from headrace.engines.base import Sample, SampleRequest, Swap
from headrace.engines.embedded.part import open_engine
from headrace.engines.registry import EngineSetup
from headrace.messages.rollout import Span


class Stale:
    """The embedded engine, whose first version is its last."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._told = engine, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        self._told = version
        if version:
            return Swap(version=version, state_hash=state_hash, pause_ms=0.0)
        swap: Swap = await self._engine.load(version, path, state_hash)
        return swap

    async def sample(self, request: SampleRequest) -> Sample:
        made: Sample = await self._engine.sample(request)
        spans = tuple(Span(span.start, span.end, self._told) for span in made.spans)
        return msgspec.structs.replace(made, spans=spans)


async def stale(setup: EngineSetup) -> Stale:
    return Stale(await open_engine(setup))
