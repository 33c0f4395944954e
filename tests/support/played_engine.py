"""An engine, by its name in [engine] kind, that samples the completions of tests/support/completions.py."""

import hashlib

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.engines.registry import EngineSetup
from headrace.messages.rollout import Span
from headrace.rendering.tokenizer import Tokenizer
from tests.support.completions import completions

PLAYED: dict[str, list[str]] = {}
"""Trajectory to the completions that were sampled for it."""
SYNTAX = "hermes"


class PlayedEngine:
    """The n-th turn of a trajectory is the n-th completion that its name seeds."""

    fingerprint = "played"
    version = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def sample(self, request: SampleRequest) -> Sample:
        trajectory = request.session.rpartition("/")[0]
        played = PLAYED.setdefault(trajectory, [])
        seed = int.from_bytes(hashlib.sha256(trajectory.encode()).digest()[:6])
        text = list(completions(seed, len(played) + 1, only=SYNTAX))[-1][1]
        played.append(text)
        ids = (*self._tokenizer.encode(text), request.stop_ids[0])
        span = Span(0, len(request.ids) + len(ids) - 1, 0)
        return Sample(ids=ids, logprobs=(-0.5,) * len(ids), routed=None, spans=(span,), stop="stop")

    async def close(self, session: str) -> None: ...

    async def stop(self) -> None: ...

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        return Swap(version=version, state_hash=state_hash, pause_ms=0.0)

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        raise EngineError("one version alone")

    async def unpin(self, version: int) -> None: ...


async def open_engine(setup: EngineSetup) -> PlayedEngine:
    path = await setup.tokenizer()
    assert path is not None
    return PlayedEngine(Tokenizer.parse(path.read_text(encoding="utf-8")))
