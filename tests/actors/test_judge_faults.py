"""Forged reports, faults of the judge itself, and the end of a group's machine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.bus.connection import Bus
from headrace.config import Environment as Section
from headrace.messages import tasks
from headrace.messages.ledger import GroupDropped
from headrace.messages.operations import Event
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import CLOSE, EVENT, FAIL, SCORE, TRAJ
from headrace.vmhost.node import pool
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.folder_suites import write_suite
from tests.support.judging import FIXED, ORACLE, PATH, TASK, config, first, judged, trajectory

pytestmark = pytest.mark.anyio


@pytest.fixture
async def observer(connect: Connect) -> Bus:
    return await connect("admin")


@pytest.fixture
async def environment(connect: Connect, tmp_path: Path) -> AsyncIterator[Environment]:
    async with living(Environment, config(tmp_path), await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


FORGES_OBSERVATIONS = b"""import json

json.dumps = lambda *values, **options: '[0,["t",[["f",1' + "0" * 400 + "]]]]"
"""
"""The sealed test hands its value to json.dumps: this answers with a number that overflows a float."""


def events(kind: str) -> Any:
    return lambda message: isinstance(message, Event) and message.kind == kind


async def test_a_forged_observation_is_reward_0_and_no_infrastructure(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    async with living(Judge, config(tmp_path), await connect("judge"), "j13"):
        score = await judged(observer, trajectory("j13", "g1", {PATH: FORGES_OBSERVATIONS + FIXED}))
    assert (score.verdict, score.reward, score.reason) == ("failed", 0.0, "")
    assert score.tests[0].observed[0].startswith('[0,["t",[["f",1000')
    where = EVENT.where(run="j13", actor="judge", type="event")
    told = [received.message async for received in observer.history("HR_EVENT", where)]
    assert [event.kind for event in told if isinstance(event, Event) and event.level == "error"] == []


REPORTS_TOO_MUCH = b"""import json

json.dumps = lambda *values, **options: "x" * 400_000
"""


async def test_a_report_beyond_the_bounds_is_refused_with_its_reason(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    # The guest's half counts what it collects, so a forger has to switch that off as well.
    code = (
        REPORTS_TOO_MUCH
        + b"import gc\nfor thing in gc.get_objects():\n    if type(thing).__name__ == 'Observations':\n"
    )
    code += b"        thing._room = 1 << 40\n"
    async with living(Judge, config(tmp_path), await connect("judge"), "j14"):
        score = await judged(observer, trajectory("j14", "g1", {PATH: code + FIXED}))
    assert (score.verdict, score.reward, score.passed) == ("failed", -1.0, False)
    assert score.reason.startswith("refused_output: ") and "characters of observations" in score.reason


async def test_a_fault_of_the_judge_leaves_the_attempt_out_with_its_traceback(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    """A suite whose recorded answer is no literal: the comparison raises in our own process."""
    name = ORACLE.expected[0]
    broken = msgspec.structs.replace(ORACLE, ref=tasks.TaskRef("broken", "1"), answers={name: ((0, "1 +"),)})
    task = msgspec.structs.replace(TASK, ref=broken.ref)
    write_suite("broken", tmp_path / "suites" / "broken", [(task, broken)], "a test")
    async with living(Judge, config(tmp_path), await connect("judge"), "j15"):
        made = trajectory("j15", "g1", {PATH: FIXED}, task=broken.ref)
        await observer.publish(TRAJ.at(run="j15", group="g1"), made)
        where = EVENT.where(run="j15", actor="judge", type="event")
        told = await first(observer, "HR_EVENT", where, events("judge_fault"))
    failed = [received.message.reason async for received in observer.history("HR_LEDGER", FAIL.where(run="j15"))]
    scores = [received.message async for received in observer.history("HR_SCORE", SCORE.where(run="j15"))]
    assert (failed, scores) == (["judge_fault"], [])
    assert told.level == "error" and "Traceback" in told.text and "sealing.py" in told.text


async def test_the_end_of_a_group_ends_its_shared_machine(
    connect: Connect, tmp_path: Path, observer: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "GROUP_IDLE_S", 600.0)
    settings = config(tmp_path, environment=Section(backend="process", lease_s=20.0))
    async with (
        living(Environment, settings, await connect("environment", node="n2"), "j16") as node,
        living(Judge, settings, await connect("judge"), "j16"),
    ):
        score = await judged(observer, trajectory("j16", "g1", {PATH: FIXED}, isolation="group"))
        second_score = await judged(observer, trajectory("j16", "g2", {PATH: FIXED}, isolation="group"))
        assert score.passed and second_score.passed
        held = node._host.usage()["vms"]
        dropped = GroupDropped(run="j16", group="g1", reason="stale", group_size=2)
        await observer.publish(CLOSE.at(run="j16", group="g1"), dropped)
        while node._host.usage()["vms"] == held:
            await asyncio.sleep(0.01)
        assert node._host.usage()["vms"] == held - 1
