"""Completions of every kind through the rollout actor: no attempt is lost, and each call has an answer."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.bus.payloads import renderer_bundles
from headrace.config import Engine
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import FAIL, TASK, TRAJ, token
from headrace.messages.tasks import TaskRef
from headrace.registry import admit
from headrace.tasks import open_suite
from tests.conftest import Connect
from tests.support import chat_formats, played_engine
from tests.support.actors import living
from tests.support.staged import config, first, stage

pytestmark = pytest.mark.anyio
SUITE = "generated/train"
TURNS = 10
ENGINE = "tests.support.played_engine:open_engine"


@pytest.fixture
async def observer(connect: Connect) -> Bus:
    return await connect("admin")


@pytest.fixture
async def environment(connect: Connect, tmp_path: Path) -> AsyncIterator[Environment]:
    async with living(Environment, config(tmp_path), await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


async def play(connect: Connect, observer: Bus, folder: Path, syntax: str, groups: int) -> list[Trajectory]:
    """Trajectories of as many attempts, each of completions in one syntax."""
    run = f"bad-{syntax.replace('_', '-')}"
    await renderer_bundles.publish(await connect("trainer"), run, chat_formats.bundle_of_run(syntax))
    file = folder / "0.safetensors"
    file.touch()
    await stage(observer, run, "here", 0, str(file), "no weights")
    played_engine.SYNTAX = syntax
    section = msgspec.structs.replace(config(folder), engine=Engine(kind=ENGINE))
    admit("engines", [ENGINE])
    ids = open_suite(SUITE).ids()
    async with living(Rollout, section, await connect("rollout", node="here"), run, "roll"):
        for number in range(groups):
            request = RolloutRequest(
                run=run,
                lane="train",
                group=f"{run}{number}",
                slot=0,
                attempt=0,
                task=TaskRef(SUITE, ids[number]),
                seed=7,
                sampling=Sampling(max_turn_tokens=1 << 16),
                limits=Limits(max_turns=TURNS, max_tokens=1 << 22, context_tokens=1 << 22, wall_s=600.0),
            )
            await observer.publish(TASK.at(run=run, lane="train", suite=token(SUITE)), request)
        ends = [
            await first(observer, "HR_TRAJ", TRAJ.at(run=run, group=f"{run}{number}"), lambda message: True)
            for number in range(groups)
        ]
    assert await observer.last("HR_TURN", FAIL.where(run=run)) is None, "no attempt failed"
    return ends


def check(ends: list[Trajectory]) -> int:
    """Each sampled turn is recorded with calls, each call has an answer. Returns the number of turns."""
    for end in ends:
        assert end.outcome in ("finished", "max_turns")
        assert len(end.turns) == len(played_engine.PLAYED[end.id])
        for turn in end.turns:
            assert turn.calls and [call.id for call in turn.calls] == [result.call_id for result in turn.results]
            for call, result in zip(turn.calls, turn.results, strict=True):
                assert result.output and (result.output == call.error or not call.error or result.truncated)
    return sum(len(end.turns) for end in ends)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("syntax", chat_formats.TEMPLATES)
async def test_a_thousand_malformed_turns_are_answered(
    syntax: str, connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    share = 1000 // len(chat_formats.TEMPLATES) + 1
    groups = share // TURNS + 6
    assert check(await play(connect, observer, tmp_path, syntax, groups)) >= share
