"""CPU that an attempt with a harness needs on top of headrace's own agent: tunnel, endpoint and recording.

The same three commands by both. Counted are the actors (one process here) and the broker. The processes of the sandbox
are not: its agent, the tunnel's end, the harness and what it runs.
"""

import json
import time
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from headrace.harnesses import bundles
from headrace.messages.rollout import Trajectory
from tests.actors.test_episode_path import cpu_ms
from tests.conftest import Connect
from tests.support import small_harness
from tests.support.client_engine import PLAYS, Play, Said, Script
from tests.support.harness_run import HarnessRun, harness_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ATTEMPTS = 20
LOOK: Said = ("I look.", [("bash", {"command": "ls"})])
OWN: Said = ("I look.", [("terminal", {"command": "ls"})])


async def spent(run: HarnessRun, broker: int, group: str) -> float:
    """CPU-ms of an attempt."""
    for slot in range(3):
        assert isinstance(await run.attempt(slot, f"{group}-warm"), Trajectory)
    began = time.process_time() * 1000 + cpu_ms(broker)
    for slot in range(ATTEMPTS):
        made = await run.attempt(slot, group)
        assert isinstance(made, Trajectory) and made.outcome == "finished" and len(made.turns) == 4, made
    return (time.process_time() * 1000 + cpu_ms(broker) - began) / ATTEMPTS


async def test_the_endpoint_costs_little(connect: Connect, server: Server, tmp_path: Path) -> None:
    own = small_harness.program(tmp_path / "bundle")
    bundles.make(tmp_path / "cache", own)
    turns = [LOOK, LOOK, LOOK, ("Done.", [])]
    mark = "<|im_start|>"
    async with harness_run(
        connect, tmp_path, "cost", "small", turns, own=own, cache=tmp_path / "cache", mark=mark
    ) as run:
        with_harness = await spent(run, server.pid, "h")
        PLAYS.append(Play(Script(mark, [OWN, OWN, OWN, ("", [("finish", {})])])))
        with_own = await spent(run._replace(harness=""), server.pid, "o")
    figures = {"with_harness": with_harness, "own": with_own, "above": with_harness - with_own}
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    assert with_harness - with_own <= 40.0, "20 on a quiet machine; other processes of this one share its caches"
