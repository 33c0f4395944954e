"""Fixtures that the harness tests share: a renderer, an engine with given token ids, a request."""

from collections.abc import Callable, Sequence

import pytest

from headrace.engines.base import Sample, SampleRequest, Swap
from headrace.harness.sync_tools import answer
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, Span
from headrace.messages.tasks import TaskRef
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import traces
from tests.support.records import of


class Played:
    """An engine whose draws are given: turn by turn, cut at the cap like any generation."""

    def __init__(self, turns: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> None:
        self._turns, self._stop = [list(turn) for turn in turns], set(stop_ids)
        self.asked: list[SampleRequest] = []
        self.closed: list[str] = []

    @property
    def fingerprint(self) -> str:
        return "played"

    @property
    def version(self) -> int:
        return 3

    async def sample(self, request: SampleRequest) -> Sample:
        self.asked.append(request)
        ids = tuple(self._turns.pop(0)[: request.sampling.max_turn_tokens])
        span = Span(0, len(request.ids) + len(ids) - 1, 3)
        ended = bool(ids) and ids[-1] in self._stop
        return Sample(
            ids=ids,
            logprobs=(-0.5,) * len(ids),
            routed=None,
            spans=(span,),
            stop="stop" if ended else "length" if ids else "abort",
        )

    async def close(self, session: str) -> None:
        self.closed.append(session)

    async def stop(self) -> None: ...

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        raise NotImplementedError

    async def pin(self, version: int, path: str, state_hash: str) -> None: ...

    async def unpin(self, version: int) -> None: ...


@pytest.fixture(scope="session")
def renderer() -> TerseRenderer:
    return TerseRenderer(Tokenizer.train(traces.tokenizer_texts(3, 150, Format(), answer), 640))


@pytest.fixture
def request_for() -> Callable[..., RolloutRequest]:
    def make(task: TaskRef, limits: Limits | None = None, sampling: Sampling | None = None) -> RolloutRequest:
        limits, sampling = limits or Limits(), sampling or Sampling()
        return of(RolloutRequest, run="r1", group="g000001", task=task, seed=5, limits=limits, sampling=sampling)

    return make


@pytest.fixture
def played(renderer: TerseRenderer) -> Callable[..., Played]:
    return lambda *turns: Played(turns, renderer.stop_ids)
