"""Hundreds of trajectories at once through one rollout actor, under its supervisor, with a real engine and broker."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import pins
from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.episode import Episode
from headrace.actors.rollout.turn_log import TurnLog
from headrace.bus.broker.server import Server
from headrace.bus.runtime import supervisor
from headrace.bus.runtime.supervisor import Supervisor
from headrace.config import Engine
from headrace.config import Environment as Section
from headrace.config import Rollout as RolloutSection
from headrace.engines.base import Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.base import Message
from headrace.messages.operations import Heartbeat
from headrace.messages.rollout import PolicyRef, TurnSampled
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import FAIL, HEARTBEAT, TASK, TRAJ, TURN, token
from tests.actors.rollout.test_actor import everything, queue_is_empty
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.many_requests import SLOTS, requests
from tests.support.patience import PATIENCE_S
from tests.support.staged import config, made, prepare, stage

pytestmark = pytest.mark.anyio

AT_ONCE, TURNS = 256, 3
RUN = "many"
LAG_S = 0.5
"""Longest time in seconds for which the event loop may compute before it runs another task. Processor time of its
thread, because on a busy machine other processes add to the wall time. The environment actor and the observer of the
test share this loop."""
BEAT_S = 0.2
"""The heartbeat's period in this test, so that several fall into it."""


class Watched(Rollout):
    """The rollout actor that the supervisor started last."""

    last: ClassVar[Rollout]

    @classmethod
    def name(cls) -> str:
        return Rollout.name()

    async def start(self) -> None:
        Watched.last = self
        await super().start()


async def longest_lag(seconds: list[float]) -> None:
    """Append to a list how long the event loop computed between two turns of this task, without end."""
    while True:
        before = time.thread_time()
        await asyncio.sleep(0.002)
        seconds.append(time.thread_time() - before)


class Gate:
    """Holds every first turn back until it is opened; an engine samples through it."""

    def __init__(self) -> None:
        self.trajectories: set[str] = set()
        """Those that have asked for their first turn, each with its sandbox."""
        self.open = asyncio.Event()

    async def wait(self, session: str) -> None:
        """Wait until the gate is open."""
        self.trajectories.add(session.partition("/")[0])
        await self.open.wait()


@asynccontextmanager
async def supervised(server: Server, folder: Path) -> AsyncIterator[Rollout]:
    """A rollout actor under its supervisor, once it has started."""
    setting = msgspec.structs.replace(
        config(folder), rollout=RolloutSection(credit=AT_ONCE), engine=Engine(max_batch=AT_ONCE)
    )
    keeper = Supervisor(setting, RUN, url=server.url, credentials=server.credentials, restarts=0)
    task = asyncio.create_task(keeper.run([(Watched, "wide")]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not getattr(getattr(Watched, "last", None), "started", False):
                assert not task.done(), "the actor did not start"
                await asyncio.sleep(0.01)
        yield Watched.last
    finally:
        keeper.stop()
        assert await asyncio.wait_for(task, PATIENCE_S) == 0


def holds(actor: Rollout) -> dict[str, int]:
    """Number of the things that an actor holds for its trajectories, by name; without those that are empty."""
    sandboxes, policies = actor._sandboxes, actor._policies
    engine = policies.engine
    assert isinstance(engine, EmbeddedEngine)
    held: dict[str, Sized] = {
        "running": actor._running,
        "cancelled": actor._cancelled,
        "handing back": actor._handing_back,
        "client sessions": actor._clients._sessions,
        "leases": sandboxes._owned,
        "groups of acquires": sandboxes._groups,
        "waiting acquires": sandboxes._waiters,
        "releases": sandboxes._background,
        "held sandboxes": sandboxes._held,
        "pins": policies.pins._pins,
        "branches": policies._branches,
        "handlers": [task for consumer in actor._consumers for task in consumer._running],
    }
    stats = engine.stats()
    counts = {name: len(value) for name, value in held.items()}
    counts |= {f"engine: {name}": stats[name] for name in ("running", "waiting", "sessions")}
    return {name: count for name, count in counts.items() if count}


def alive() -> Counter[str]:
    """The episodes and turn logs that anything still refers to."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, Episode | TurnLog))


async def test_256_trajectories_at_once_are_each_stored_once_and_leave_nothing_behind(
    connect: Connect, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_S", BEAT_S)
    monkeypatch.setattr(pins, "UNPIN_AFTER_S", 0.1)
    before = alive()
    both = (PolicyRef(), PolicyRef(kind="pinned", version=0))
    issued = requests(RUN, range(AT_ONCE), turns=TURNS, tokens=8, policies=both)
    subject = TASK.at(run=RUN, lane="train", suite=token(issued[0].task.suite))
    wanted = {request.trajectory for request in issued}
    observer, versions = await connect("admin"), made(tmp_path)
    await prepare(connect, RUN)
    gate, sample = Gate(), EmbeddedEngine.sample

    async def gated(engine: EmbeddedEngine, request: SampleRequest) -> Sample:
        await gate.wait(request.session)
        return await sample(engine, request)

    monkeypatch.setattr(EmbeddedEngine, "sample", gated)
    beats: list[tuple[float, Heartbeat]] = []

    async def beat(message: Message) -> None:
        assert isinstance(message, Heartbeat)
        beats.append((time.monotonic(), message))

    await observer.listen(HEARTBEAT.at(actor="rollout", id="wide"), beat)
    nodes = msgspec.structs.replace(
        config(tmp_path),
        environment=Section(backend="process", lease_s=60.0, max_vms=AT_ONCE // SLOTS, judge_share=0, max_busy=0.0),
    )
    async with (
        asyncio.timeout(PATIENCE_S),
        living(Environment, nodes, await connect("environment", node="n1"), ANY_RUN) as environment,
        supervised(server, tmp_path) as actor,
    ):
        lags: list[float] = []
        watching = asyncio.create_task(longest_lag(lags))
        began = time.monotonic()
        await stage(observer, RUN, actor.bus.node, 0, *versions[0])
        await asyncio.gather(*(observer.publish(subject, request) for request in issued))
        while len(gate.trajectories) < AT_ONCE or f"version 0, {AT_ONCE} running" != beats[-1][1].status:
            await asyncio.sleep(0.01)
        assert len(actor._sandboxes) == len(environment._leases) == AT_ONCE
        gate.open.set()
        stored: list[str] = []
        async for received in observer.follow("HR_TRAJ", TRAJ.where(run=RUN)):
            stored.append(received.message.id)
            if len(stored) == AT_ONCE:
                break
        ended = time.monotonic()
        await queue_is_empty(observer, RUN)
        while (held := holds(actor)) or len(environment._leases):
            assert time.monotonic() < ended + 60.0, f"held after the end: {held}, {len(environment._leases)} leases"
            await asyncio.sleep(0.01)
        watching.cancel()
        while beats[-1][0] < ended:
            await asyncio.sleep(0.01)
        assert alive() == before, "an episode or a turn log is not freed"
        records = await everything(observer, "HR_TURN", TURN.where(run=RUN))

    assert set(stored) == wanted and Counter(stored).most_common(1)[0][1] == 1
    assert len(await everything(observer, "HR_TRAJ", TRAJ.where(run=RUN))) == AT_ONCE
    assert await everything(observer, "HR_LEDGER", FAIL.where(run=RUN)) == []
    turns = Counter(record.trajectory for record in records if isinstance(record, TurnSampled))
    assert set(turns) == wanted and set(turns.values()) <= set(range(1, TURNS + 1))
    assert max(lags) <= LAG_S, f"the event loop computed for {max(lags):.2f} s"
    during = [message.status for at, message in beats if began <= at <= ended]
    assert len(during) >= 5, "heartbeats stop while the trajectories run"
