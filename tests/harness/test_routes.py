"""Routes of a session whose context is forwarded again: a record has those of each position once."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.engines.base import Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.harness.context import Context
from headrace.harness.loop import sample_turn
from headrace.messages.rollout import RolloutRequest, Sampling, Span, Turn
from headrace.messages.tasks import TaskRef
from headrace.policy import scoring
from headrace.rendering.terse import TerseRenderer
from tests.support import tiny
from tests.support.engines import Versions
from tests.support.segments import segments_of
from tests.training.batches.test_batch import trajectory

pytestmark = pytest.mark.anyio

PROMPTS = ([5] * 90, [6, 7, 8], [9] * 4, [10])


class WithoutStart:
    """An engine that is not told which routes its caller has."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def sample(self, request: SampleRequest) -> Sample:
        return await self._engine.sample(msgspec.structs.replace(request, routed=0))

    async def close(self, session: str) -> None:
        await self._engine.close(session)


async def test_a_turn_brings_the_routes_of_new_positions_although_all_are_forwarded_again(
    renderer: TerseRenderer, request_for: Callable[..., RolloutRequest], tmp_path: Path
) -> None:
    versions = Versions(msgspec.structs.replace(tiny.config(), vocab=640), tmp_path)
    asked = request_for(TaskRef("generated/dev", "1"), sampling=Sampling(max_turn_tokens=6))
    played: list[list[Turn]] = []
    for told in (True, False):
        engine = versions.engine()
        sampler = engine if told else WithoutStart(engine)
        turns: list[Turn] = []
        context = Context(renderer, "", 4096)
        for version, prompt in enumerate(PROMPTS):
            await versions.load(engine, version)
            await engine.close("s")  # as after a move to another engine
            turns.append(await sample_turn(sampler, renderer, asked, context, prompt, "act", turns, "s", left=4096))
            context.take(turns[-1])
        await engine.stop()
        played.append(turns)
    short, whole = played
    ends = [span.end for turn in short for span in turn.spans]
    assert [turn.spans for turn in short] == [(Span(0, end, version),) for version, end in enumerate(ends)]
    rows = [[len(turn.routed) for turn in turns if turn.routed is not None] for turns in played]
    assert rows[1] == ends and rows[0] == [end - start for start, end in zip([0, *ends], ends, strict=False)]
    print(f"rows of routes by turn: {rows[0]}; from the first position on: {rows[1]}")

    (new,), (old,) = segments_of(trajectory(*short)), segments_of(trajectory(*whole))
    for name in ("ids", "positions", "targets", "behaviour", "versions", "routes"):
        assert torch.equal(getattr(new, name), getattr(old, name)), name
    assert new.spans == old.spans and [span.start for span in new.spans] == [0] * len(PROMPTS)
    models = {version: versions.model(version) for version in range(len(PROMPTS))}
    ids = torch.cat([new.ids, new.targets[-1:]])
    live: list[torch.Tensor] = []
    scored = scoring.score(models, ids, new.spans, (new.positions + 1).tolist(), 1.0, recorder=live)
    assert torch.equal(scored, new.behaviour), "Law 5"
    assert new.routes is not None and torch.equal(live[0][: len(new.routes)], new.routes), "of first forwards"
