"""An engine whose policy says given texts: what a scripted engine has besides its script."""

from typing import Self

import msgspec

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.engines.registry import EngineSetup
from headrace.messages.rollout import Span
from headrace.rendering.tokenizer import Tokenizer


class TextEngine:
    """A subclass has `sample`."""

    fingerprint = "scripted"
    version = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    async def open(cls, setup: EngineSetup) -> Self:
        path = await setup.tokenizer()
        assert path is not None
        return cls(Tokenizer.parse(path.read_text(encoding="utf-8")))

    def sampled(self, request: SampleRequest, text: str, held: int | None = None) -> Sample:
        """The sample of a text. held: ids of a turn that was cut."""
        ids = (*self.tokenizer.encode(text), request.stop_ids[0])[:held]
        if request.progress is not None:
            request.progress.add(ids, 0)
        span = Span(0, len(request.ids) + len(ids) - 1, 0)
        made = Sample(ids=ids, logprobs=(-0.5,) * len(ids), routed=None, spans=(span,), stop="stop")
        return made if held is None else msgspec.structs.replace(made, stop="abort")

    async def close(self, session: str) -> None: ...

    async def stop(self) -> None: ...

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        return Swap(version=version, state_hash=state_hash, pause_ms=0.0)

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        raise EngineError("one version alone")

    async def unpin(self, version: int) -> None: ...
