"""Supervision: restarts, intensity, signals, beats. Signals are tried on a real process."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.errors import BusTimeout
from headrace.bus.runtime import waits
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.supervisor import EXIT_FOR_GOOD, EXIT_GAVE_UP, EXIT_NO_BROKER, Supervisor
from headrace.config import Config
from headrace.errors import GAVE_UP_LACKING
from headrace.messages import subjects as s
from headrace.messages.operations import Heartbeat, Ping
from headrace.metrics import machine_use
from headrace.registry import PluginError
from headrace.vmhost.errors import VmhostError
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class Lively(Actor):
    role = "judge"
    lives = 0

    async def start(self) -> None:
        type(self).lives += 1
        self.status = f"life {self.lives}"


class FailsTwice(Lively):
    async def start(self) -> None:
        await super().start()
        if type(self).lives < 3:
            self.fail(RuntimeError(f"life {self.lives} went wrong"))


class NeverStarts(Actor):
    role = "judge"

    async def start(self) -> None:
        raise RuntimeError("cannot start")


class HalfMade(NeverStarts):
    async def drain(self) -> None:
        self.part.clear()  # type: ignore[attr-defined]

    stop = drain


def supervisor(server: Server, run: str, **options: float) -> Supervisor:
    return Supervisor(Config(), run, url=server.url, credentials=server.credentials, **options)  # type: ignore[arg-type]


async def events(connect: Connect, run: str) -> AsyncIterator[str]:
    bus = await connect("operator")
    async for received in bus.follow("HR_EVENT", s.EVENT.where(run=run, type="event")):
        yield received.message.kind


async def until(kinds: AsyncIterator[str], last: str) -> AsyncIterator[str]:
    async for kind in kinds:
        yield kind
        if kind == last:
            return


async def test_an_actor_that_fails_is_started_again(server: Server, connect: Connect) -> None:
    run, FailsTwice.lives = f"r{token_hex(4)}", 0
    life = supervisor(server, run)
    task = asyncio.create_task(life.run([(FailsTwice, "j1")]))
    kinds = []
    async for kind in events(connect, run):
        kinds.append(kind)
        if kind == "started":
            break
    assert kinds == ["actor_failed", "actor_failed", "started"]
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0


async def test_too_many_failures_end_the_process_with_a_code(server: Server, connect: Connect) -> None:
    run = f"r{token_hex(4)}"
    Lively.lives = 0
    life = supervisor(server, run, restarts=2)
    code = await asyncio.wait_for(life.run([(NeverStarts, "j2"), (Lively, "j3")]), PATIENCE_S)
    assert code == EXIT_GAVE_UP and Lively.lives == 1, "its healthy neighbour was drained, not restarted"
    kinds = []
    async for kind in events(connect, run):
        kinds.append(kind)
        if kind == "actor_gave_up":
            break
    assert kinds.count("actor_failed") == 2


class FailsAlike(Lively):
    error: Exception = RuntimeError("the file is damaged")

    async def start(self) -> None:
        await super().start()
        self.fail(self.error)


async def test_three_slow_failures_alike_end_the_process_for_good(server: Server, connect: Connect) -> None:
    """Without this rule an actor whose failures are further apart than `period` was started again without end."""
    run, FailsAlike.lives = f"r{token_hex(4)}", 0
    life = supervisor(server, run, period=0.0)
    assert await asyncio.wait_for(life.run([(FailsAlike, "j5")]), PATIENCE_S) == EXIT_FOR_GOOD
    assert FailsAlike.lives == 3
    kinds = [kind async for kind in until(events(connect, run), "actor_gave_up")]
    assert kinds == ["actor_failed", "actor_failed", "actor_gave_up"]


async def test_an_error_of_wrong_input_ends_the_process_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailsAlike.lives = 0
    monkeypatch.setattr(FailsAlike, "error", PluginError("mine:tool is not installed"))
    life = supervisor(server, f"r{token_hex(4)}")
    assert await asyncio.wait_for(life.run([(FailsAlike, "j10")]), PATIENCE_S) == EXIT_FOR_GOOD
    assert FailsAlike.lives == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(VmhostError("no /dev/kvm"), GAVE_UP_LACKING), (BusTimeout("no answer"), EXIT_NO_BROKER), (OSError(28, "x"), 6)],
)
async def test_the_kind_of_the_last_failure_is_the_code_of_a_process_that_gave_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    monkeypatch.setattr(FailsAlike, "error", error)
    life = supervisor(server, f"r{token_hex(4)}", restarts=1)
    assert await asyncio.wait_for(life.run([(FailsAlike, "j9")]), PATIENCE_S) == code


async def test_a_broker_that_is_away_is_no_failure_alike(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, FailsAlike.lives = f"r{token_hex(4)}", 0
    monkeypatch.setattr(FailsAlike, "error", BusTimeout("no answer"))
    life = supervisor(server, run, period=0.0)
    task = asyncio.create_task(life.run([(FailsAlike, "j6")]))
    seen = 0
    async for kind in events(connect, run):
        seen += kind == "actor_failed"
        if seen == 4:
            break
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0


class Numbered(RuntimeError):
    """Another text each time, as one with a process id has."""

    alike = "rank 1 was killed"
    count = 0

    def __str__(self) -> str:
        Numbered.count += 1
        return f"rank 1 (process {Numbered.count}) was killed"


@pytest.mark.parametrize(("alike", "code"), [("rank 1 was killed", EXIT_FOR_GOOD), ("", EXIT_GAVE_UP)])
async def test_failures_are_compared_by_what_they_have_alike(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch, alike: str, code: int
) -> None:
    """The text of a lost rank has its process id, so no two such failures were alike."""
    run, FailsAlike.lives = f"r{token_hex(4)}", 0
    monkeypatch.setattr(Numbered, "alike", alike)
    monkeypatch.setattr(FailsAlike, "error", Numbered())
    # With an empty `alike` only the number of failures counts: a fifth one within the last 60 s.
    life = supervisor(server, run, period=0.0 if alike else 60.0, restarts=4)
    assert await asyncio.wait_for(life.run([(FailsAlike, "j7")]), PATIENCE_S) == code
    assert FailsAlike.lives == (3 if alike else 5)


async def test_parts_that_a_failed_start_never_made_are_no_failures_of_their_own(
    server: Server, connect: Connect
) -> None:
    """Before, "object has no attribute" replaced the reason."""
    run = f"r{token_hex(4)}"
    life = supervisor(server, run, restarts=1)
    async with asyncio.timeout(PATIENCE_S):
        assert await life.run([(HalfMade, "j4")]) == EXIT_GAVE_UP
        kinds = []
        async for kind in events(connect, run):
            kinds.append(kind)
            if kind == "actor_gave_up":
                break
    assert "handler_failed" not in kinds and "actor_failed" in kinds


class Interrupted(Lively):
    undone = False

    async def start(self) -> None:
        await super().start()
        try:
            await self.news(asyncio.Event())
        finally:
            for _ in range(3):
                await self.event("undoing")
            type(self).undone = True


async def test_a_start_that_is_interrupted_may_still_await_to_undo_its_work(server: Server) -> None:
    Interrupted.lives = 0
    life = supervisor(server, f"r{token_hex(4)}")
    task = asyncio.create_task(life.run([(Interrupted, "j8")]))
    while not Interrupted.lives:
        await asyncio.sleep(0.01)
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert Interrupted.undone


async def test_beats_presence_and_ping(server: Server, connect: Connect) -> None:
    run, operator = f"r{token_hex(4)}", await connect("operator")
    beats = asyncio.Queue[Heartbeat]()

    async def hear(raw: object) -> None:
        from headrace.messages.codec import decode

        beat = decode(raw.data, raw.headers)  # type: ignore[attr-defined]
        assert isinstance(beat, Heartbeat)
        if beat.run == run:
            await beats.put(beat)

    await operator.connection.subscribe(s.HEARTBEAT.where(), hear)
    presence = await operator.kv("HR_PRESENCE")
    life = supervisor(server, run)
    task = asyncio.create_task(life.run([(Lively, "j4")]))
    first = await asyncio.wait_for(beats.get(), PATIENCE_S)
    assert (first.actor, first.id) == ("lively", "j4")
    async for key, message, _ in presence.watch("judge.*"):
        if key == "judge.j4" and isinstance(message, Heartbeat) and message.run == run:
            break
    answer = await operator.request("hr.rpc.judge.operator.j4.ping", Ping())
    assert isinstance(answer, Heartbeat) and answer.id == "j4"
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    states = [first.state]
    while states[-1] != "stopped":
        states.append((await asyncio.wait_for(beats.get(), PATIENCE_S)).state)
    assert await presence.get("judge.j4") is None


class WaitsForBatch(Actor):
    role = "trainer"

    async def start(self) -> None:
        self.spawn(self.news(asyncio.Event(), "batch 7"), "waiting")


async def test_a_wait_that_lasts_is_an_event(server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "WATCHDOG_S", 0.01)
    monkeypatch.setattr(machine_use, "PERIOD_S", 0.0)
    run = f"r{token_hex(4)}"
    life = supervisor(server, run)
    task = asyncio.create_task(life.run([(WaitsForBatch, "t1")]))
    bus = await connect("operator")
    async with asyncio.timeout(PATIENCE_S):
        async for received in bus.follow("HR_EVENT", s.EVENT.where(run=run, type="event")):
            if received.message.kind == "still_waiting":
                break
    assert received.message.level == "warning" and received.message.text.endswith(" s: batch 7")
    beat = await bus.request("hr.rpc.trainer.operator.t1.ping", Ping())
    assert isinstance(beat, Heartbeat) and beat.waits == "batch 7"
    async with asyncio.timeout(PATIENCE_S):
        while beat.cpu is None:  # the kernel's counters have not moved yet
            answer = await bus.request("hr.rpc.trainer.operator.t1.ping", Ping())
            assert isinstance(answer, Heartbeat)
            beat = answer
    life.stop()
    assert await asyncio.wait_for(task, PATIENCE_S) == 0


async def test_no_broker_gives_up_with_its_own_code() -> None:
    life = Supervisor(Config(), "r1", url="nats://127.0.0.1:1", restarts=1, connect_s=0.1)
    assert await asyncio.wait_for(life.run([(Lively, "j5")]), PATIENCE_S) == 4


CHILD = """
import asyncio, sys, uvloop
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.supervisor import run_actors
from headrace.config import Config
from headrace.messages import subjects as s

class Judge(Actor):
    role = "judge"
    async def start(self):
        await self.consume(s.TRAJ, self.handle, durable=f"judge-{self.run}")
    async def handle(self, received):
        await asyncio.Event().wait()
    async def drain(self):
        await self.event("drain_seen")

sys.exit(uvloop.run(run_actors([(Judge, "j9")], Config(), sys.argv[1], url=sys.argv[2], credentials=sys.argv[3])))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_a_real_process(
    server: Server, connect: Connect, tmp_path: Path, how: signal.Signals
) -> None:
    run = f"r{token_hex(4)}"
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(script), run, server.url, str(server.credentials), stderr=asyncio.subprocess.PIPE
    )
    kinds = []
    async for kind in events(connect, run):
        kinds.append(kind)
        if kind == "started":
            child.send_signal(how)
        if kind == "drain_seen":
            break
    _, log = await asyncio.wait_for(child.communicate(), PATIENCE_S)
    assert child.returncode == 0, log.decode()
    assert b'"event": "started"' in log and b'"actor": "judge"' in log


async def test_an_actor_is_named_after_its_class() -> None:
    assert FailsTwice.name() == "fails_twice" and Lively.name() == "lively"
