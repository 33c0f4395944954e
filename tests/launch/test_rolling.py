"""Parts of a run are exchanged while it goes on, and two runs share a broker without noticing each other."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from headrace.messages.rollout import Trajectory
from headrace.messages.sandbox import ToolLog
from headrace.replay.audit import audit
from tests.launch.test_up import command, up
from tests.support.keys import as_writers

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PARTS = ("curriculum", "environment", "judge", "rollout", "trainer", "weight_sender")


async def again(bus: Bus, run: str, actor: str, pid: int) -> None:
    """Wait until another process than `pid` says that this actor runs."""
    async for received in bus.follow("HR_EVENT", s.EVENT.where(run=run, type="event")):
        event = received.message
        if (event.kind, event.actor) == ("started", actor) and event.data["pid"] != pid:
            return


@pytest.mark.timeout(600)
async def test_every_part_is_drained_and_replaced_while_the_run_goes_on(tmp_path: Path) -> None:
    """As an operator upgrades: SIGTERM, and `up` starts what is installed now. Only sandboxes go with their node."""
    async with up(tmp_path, **{"curriculum.steps": 8}) as started:
        await started.line("run r")
        bus, run = await started.operator(), started.run.name
        scores = bus.follow("HR_SCORE", s.SCORE.where(run=run))
        for part in PARTS:
            for _ in range(4):  # something has been done since the last one
                await anext(scores)
            [process] = [child for child in started.family() if part in child.actors.split(",")]
            os.kill(process.pid, signal.SIGTERM)
            await again(bus, run, part, process.pid)
        await bus.close()
        code, said = await started.end(300.0)
    assert (code, said) == (0, "")
    report = json.loads((started.run / "report.json").read_text())
    assert [text.split()[0] for text in report["restarts"]] == list(PARTS)
    assert all("code 0" in text for text in report["restarts"]), report["restarts"]
    ledger = report["ledger"]
    assert report["steps"] == 8 and ledger["balanced"] and ledger["in_flight"] == 0
    assert set(ledger["attempts"]["lost"]) <= {"sandbox_lost"}, "what drains hands its work on"
    assert report["max_abs_dlp"] == 0.0


@pytest.mark.timeout(600)
async def test_two_runs_on_one_broker_do_not_touch_each_other(tmp_path: Path) -> None:
    """On one host, with the same names: one is killed in the middle, and the other does not notice."""
    async with Server(tmp_path / "broker") as server:
        async with await as_writers(server.url, server.credentials) as admin:
            await declare(admin)
            shared = {"bus.url": server.url, "bus.credentials": str(server.credentials)}
            places = [tmp_path / name for name in ("one", "two")]
            for place in places:
                place.mkdir()
            async with (
                up(places[0], **shared, **{"curriculum.steps": 500, "run.id": "r-one"}) as doomed,
                up(places[1], **shared, **{"curriculum.steps": 6, "run.id": "r-two", "run.seed": 2}) as steady,
            ):
                for child in (doomed, steady):
                    await child.line("run r-")
                await both_work(admin, "r-one", "r-two")
                status = command(places[1], "status").stdout
                assert status.startswith("run r-two: active") and status.count("  trainer  ") == 1
                doomed.process.kill()
                doomed.process.communicate()
                doomed.nobody_is_left()
                code, said = await steady.end(300.0)
            assert (code, said) == (0, "")
            first, second = await audit(admin, "r-one"), await audit(admin, "r-two")
            nodes = {run: await nodes_of(admin, run) for run in ("r-one", "r-two")}
            events = [r.message async for r in admin.history("HR_EVENT", s.EVENT.where(run="r-two", type="event"))]
    report = json.loads((steady.run / "report.json").read_text())
    assert first.balanced and first.in_flight > 0
    assert second.balanced and second.in_flight == 0 and second.trained == 48 and second.attempts.lost == {}
    assert report["restarts"] == [] and report["max_abs_dlp"] == 0.0
    assert nodes["r-one"] and nodes["r-two"] and not nodes["r-one"] & nodes["r-two"]
    assert not [event for event in events if isinstance(event, Event) and event.level == "error"]


async def both_work(bus: Bus, *runs: str) -> None:
    """Wait until each has finished some episodes."""

    async def works(run: str) -> None:
        seen = 0
        async for received in bus.follow("HR_TRAJ", s.TRAJ.where(run=run)):
            assert isinstance(received.message, Trajectory)
            seen += 1
            if seen == 8:
                return

    await asyncio.gather(*(works(run) for run in runs))


async def nodes_of(bus: Bus, run: str) -> set[str]:
    """The nodes on which a run's calls were answered."""
    lines = [r.message async for r in bus.history("HR_EVENT", s.EVENT.where(run=run, type="tool_log"))]
    return {line.node for line in lines if isinstance(line, ToolLog)}
