"""Eight slots of a scripted policy through rollout, environment and judge, each in a process of its own.

The printed figure is the cost of the path without engine and sandbox: CPU of the three actor processes and of the
broker per episode, judge included. It is reported, and only its order of magnitude is asserted.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.config import Config, Production, Run
from headrace.config import Environment as Section
from headrace.judging.rules import VERSION
from headrace.messages.judging import Score
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest
from headrace.messages.subjects import EVENT, SCORE, TASK, token
from headrace.messages.tasks import TaskRef
from headrace.tasks import open_suite
from tests.conftest import Connect
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

SLOTS = 8
CACHE = str(ROOT / ".cache" / "headrace")
ACTORS = ("environment", "rollout", "judge")
SCRIPT = (
    "import msgspec, sys, uvloop\n"
    "from headrace.actors.registry import load_class\n"
    "from headrace.bus.runtime.supervisor import run_actors\n"
    "from headrace.config import Config\n"
    "actor = load_class(sys.argv[1])\n"
    "config = msgspec.json.decode(sys.argv[2], type=Config)\n"
    "uvloop.run(run_actors([(actor, sys.argv[1])], config, sys.argv[3], url=sys.argv[4], credentials=sys.argv[5]))"
)


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, threads included."""
    return sum(float(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


@asynccontextmanager
async def processes(server: Server, config: Config, run: str) -> AsyncIterator[dict[str, int]]:
    """The three actors and the broker: name to pid."""
    started = []
    try:
        for actor in ACTORS:
            arguments = [actor, msgspec.json.encode(config).decode(), run, server.url, str(server.credentials)]
            started.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-c", SCRIPT, *arguments, stderr=asyncio.subprocess.DEVNULL
                )
            )
        names = ACTORS
        yield dict(zip(names, (process.pid for process in started), strict=True)) | {"broker": server.pid}
    finally:
        for process in started:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in started))


async def group_of_scores(bus: Bus, run: str, policy: str, group: str, task: str) -> list[Score]:
    """Issue a group, wait for all its scores."""
    for slot in range(SLOTS):
        request = RolloutRequest(
            run=run,
            lane="train",
            group=group,
            slot=slot,
            attempt=0,
            task=TaskRef("generated/train", task),
            seed=slot,
            policy=PolicyRef(kind="scripted", name=policy),
            limits=Limits(max_tokens=20_000, context_tokens=20_000),
        )
        await bus.publish(TASK.at(run=run, lane="train", suite=token("generated/train")), request)
    scores: list[Score] = []
    async for received in bus.follow("HR_SCORE", SCORE.at(run=run, judge=VERSION, group=group)):
        scores.append(received.message)
        if len(scores) == SLOTS:
            return scores
    return scores


async def started(bus: Bus, run: str) -> None:
    """Every actor published that it runs."""
    names: set[str] = set()
    async for received in bus.follow("HR_EVENT", EVENT.where(run=run, type="event")):
        if received.message.kind == "started":
            names.add(received.message.actor)
            if len(names) == len(ACTORS):
                return


@pytest.mark.parametrize("backend", ["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])])
async def test_eight_slots_pass_and_the_path_is_cheap(
    connect: Connect, server: Server, tmp_path: Path, backend: Literal["process", "qemu"]
) -> None:
    run = f"r-{backend}"
    config = Config(
        run=Run(dir=str(tmp_path)),
        environment=Section(backend=backend, cache_dir=CACHE),
        production=Production(enabled=False),
    )
    bus = await connect("admin")
    ids = open_suite("generated/train").ids()
    async with processes(server, config, run) as pids:
        await started(bus, run)
        warm = await group_of_scores(bus, run, "idle", "warm", ids[0])
        assert {score.verdict for score in warm} == {"failed"}
        before = {name: cpu_ms(pid) for name, pid in pids.items()}
        scores = await group_of_scores(bus, run, "oracle", "g1", ids[1])
        spent = {name: (cpu_ms(pid) - before[name]) / SLOTS for name, pid in pids.items()}
    assert [score.verdict for score in scores] == ["passed"] * SLOTS
    assert sorted(score.slot for score in scores) == list(range(SLOTS))
    print(json.dumps({"backend": backend} | {f"{name}_cpu_ms": round(value, 2) for name, value in spent.items()}))
    assert sum(spent.values()) < 100.0
