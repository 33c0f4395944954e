"""Checkpoints of a sandbox: an attempt continues in a copy with the state that repeated calls would not give."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.episode import Episode
from headrace.actors.rollout.sandbox_checkpoint import CheckpointSchedule, replay_calls
from headrace.actors.rollout.turn_log import ResumeState, StoredCheckpoint, TurnLog
from headrace.bus.connection import Bus
from headrace.chaos.faults import machines
from headrace.config import Config
from headrace.config import Environment as Section
from headrace.engines.base import Sample, SampleRequest
from headrace.harness.scripted import ScriptedEngine
from headrace.messages.base import Array
from headrace.messages.rollout import (
    Limits,
    PolicyRef,
    RolloutRequest,
    SandboxCheckpoint,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from headrace.messages.sandbox import ANY_RUN, Acquire, ReadFile, SandboxLost, WriteFiles
from headrace.messages.subjects import TURN
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.rendering import schemas
from headrace.rendering.base import Call
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.sandboxes.client import CannotCopy, Sandboxes
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

CACHE = str(ROOT / ".cache" / "headrace")
CONFIG = Config(environment=Section(backend="qemu", cache_dir=CACHE, max_vms=6, warm=0, lease_s=60.0))
REF = TaskRef("by-hand", "1")
TASK = Task(ref=REF, family="by-hand", prompt="look", files={"a.txt": b"a"}, allowed=("*.txt",), tests=TestPlan())
SECRET = (
    "head -c 16 /dev/urandom | od -An -tx1 > secret.txt; (sleep 600) > /dev/null 2>&1 & echo $! > pid; cat secret.txt"
)
"""State that a second run would not give again: a draw, and a process."""
LARGE = os.urandom(3 << 20)
LOOK = "cat secret.txt; kill -0 $(cat pid) && echo it lives"


def says(command: str) -> list[Call]:
    return [("terminal", {"command": command})]


class Script(ScriptedEngine):
    """An engine with given turns; before turn `gate` it sets an event and waits."""

    def __init__(self, renderer: TerseRenderer, gate: int) -> None:
        super().__init__([says(SECRET), says("cat secret.txt"), says(LOOK), says(LOOK), [("finish", {})]], renderer)
        self._gate, self._sampled = gate, 0
        self.there, self.open = asyncio.Event(), asyncio.Event()

    async def sample(self, request: SampleRequest) -> Sample:
        if self._sampled == self._gate:
            self.there.set()
            await self.open.wait()
        self._sampled += 1
        return await super().sample(request)


class Told:
    """The episode's report."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    async def __call__(self, kind: str, *_: Any, **__: Any) -> None:
        self.kinds.append(kind)


def request(run: str, **changes: Any) -> RolloutRequest:
    fields: dict[str, Any] = {"lane": "train", "group": "g1", "slot": 0, "attempt": 0, "task": REF, "seed": 7}
    limits = Limits(max_turns=9, max_tokens=20_000, context_tokens=20_000)
    policy = PolicyRef(kind="scripted", name="by hand")
    return RolloutRequest(run=run, isolation="episode", policy=policy, limits=limits, **(fields | changes))


def episode(bus: Bus, wanted: RolloutRequest, told: Told, every: int = 2) -> Episode:
    """A rollout actor with its own `Sandboxes`, as in a separate process."""
    schedule = CheckpointSchedule(every, told)
    return Episode(
        wanted,
        TASK,
        bus=bus,
        sandboxes=Sandboxes(bus, 60.0),
        rollout="r",
        lease_s=60.0,
        waits=CONFIG.rollout,
        checkpoints=schedule,
    )


@pytest.fixture(scope="module")
def renderer() -> TerseRenderer:
    return TerseRenderer(Tokenizer.train((), 256 + len(schemas.tags())))


@pytest.fixture
async def environment(connect: Connect) -> AsyncIterator[Environment]:
    async with living(Environment, CONFIG, await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


@pytest.mark.vm
@pytest.mark.parametrize("another", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_an_attempt_goes_on_in_a_copy_of_its_sandbox(
    connect: Connect, environment: Environment, renderer: TerseRenderer, another: bool
) -> None:
    """The machine dies after turn 2; the checkpoint is of turn 1. `another`: its rollout dies too, and another one
    continues."""
    bus, told, wanted = await connect("rollout"), Told(), request(f"kept{int(another)}")
    first = episode(bus, wanted, told)
    engine = Script(renderer, gate=3)
    attempt = asyncio.create_task(first.run(await first.resume_state(), engine, renderer))
    await engine.there.wait()
    if another:
        attempt.cancel()
        await asyncio.wait([attempt])
    [machine] = machines(os.getpid())
    handle = os.pidfd_open(machine)
    os.kill(machine, signal.SIGKILL)
    engine.open.set()
    if another:
        heir = episode(await connect("rollout"), msgspec.structs.replace(wanted, handovers=1), told)
        resume = await heir.resume_state()
        assert resume.checkpoint is not None and (
            resume.checkpoint.turn,
            resume.checkpoint.node,
            len(resume.turns),
        ) == (1, "n1", 3)
        attempt = asyncio.create_task(heir.run(resume, Script(renderer, gate=-1), renderer))
    end: Trajectory = await attempt
    os.close(handle)
    drawn = end.turns[0].results[0].output
    assert re.search(r"(?:[0-9a-f]{2} ?){16}", drawn)
    assert [drawn.strip() in turn.results[0].output for turn in end.turns[:4]] == [True] * 4
    assert all("it lives" in turn.results[0].output for turn in end.turns[2:4])
    assert end.diff["secret.txt"].decode().strip() == drawn.strip() and end.outcome == "finished"
    assert told.kinds == []


@pytest.mark.vm
@pytest.mark.slow
async def test_without_a_checkpoint_the_work_is_lost_and_says_so(
    connect: Connect, environment: Environment, renderer: TerseRenderer
) -> None:
    bus, told = await connect("rollout"), Told()
    first = episode(bus, request("kept2"), told, every=0)
    engine = Script(renderer, gate=3)
    attempt = asyncio.create_task(first.run(await first.resume_state(), engine, renderer))
    await engine.there.wait()
    for machine in machines(os.getpid()):
        os.kill(machine, signal.SIGKILL)
    engine.open.set()
    with pytest.raises(SandboxLost):
        await attempt
    log = [received.message async for received in bus.history("HR_TURN", TURN.where(run="kept2"))]
    assert len(log) >= 6 and not any(isinstance(record, SandboxCheckpoint) for record in log)


@pytest.mark.vm
@pytest.mark.slow
async def test_a_sandbox_is_forked_and_kept_by_its_holder(connect: Connect, environment: Environment) -> None:
    bus = await connect("rollout")
    sandboxes = Sandboxes(bus, 60.0)

    def ask(slot: int) -> Acquire:
        return Acquire(run="f", lane="train", role="rollout", group="g", slot=slot, attempt=0, isolation="episode")

    one = await sandboxes.acquire(ask(0))
    await one.call(WriteFiles(files={"a.txt": b"mine"}))
    twins = await sandboxes.fork(one, [ask(1), ask(2)])
    data = await one.checkpoint()
    await one.call(WriteFiles(files={"a.txt": b"later"}))
    with pytest.raises(CannotCopy, match="must be new"):
        await sandboxes.restore(ask(0), data, "n1")
    back = await sandboxes.restore(ask(3), data, "n1")
    for sandbox in (*twins, back):
        assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"mine" and sandbox.backend == "qemu"
    assert len(sandboxes) == 4
    with pytest.raises(CannotCopy, match="no checkpoint"):
        await sandboxes.restore(ask(4), b"nonsense", "n1")


def turn(index: int, *answers: str) -> Turn:
    ids = Array.of([1], "<i4")
    calls = tuple(ToolCall(id=f"{index}.{place}", name="terminal") for place in range(max(1, len(answers))))
    results = tuple(
        ToolResult(call_id=call.id, ok=True, output=text) for call, text in zip(calls, answers, strict=False)
    )
    return Turn(
        index=index, segment=0, prompt_ids=ids, ids=ids, logprobs=Array.of([0.0], "<f4"), calls=calls, results=results
    )


async def test_a_copy_that_remembers_something_else_is_lost() -> None:
    resume = ResumeState(
        (turn(0, "no"), turn(1, "took 0.12 s", "b"), turn(2)), "n1", "box", checkpoint=StoredCheckpoint(0, "n1", b"")
    )
    asked: list[str] = []

    async def run(call: ToolCall) -> ToolResult:
        asked.append(call.id)
        return ToolResult(call_id=call.id, ok=True, output={"1.0": "took 3.45 s", "1.1": "b"}[call.id])

    turns: list[int] = []

    async def answered(turn: Turn) -> None:
        turns.append(turn.index)

    await replay_calls(resume, run, lambda call: False, answered)
    assert asked == ["1.0", "1.1"], "neither what the copy has seen, nor what is yet to be asked"
    asked.clear()
    await replay_calls(resume, run, lambda call: call.id == "1.0", answered)
    assert asked == ["1.1"], "a call to an MCP server is not sent again"
    asked.clear()
    await replay_calls(resume, run, lambda call: True, answered)
    assert asked == [] and turns == [1, 1, 1], "a turn of such calls alone may end a step"
    other = resume._replace(turns=(turn(0), turn(1, "took 0.12 s", "c")))
    with pytest.raises(SandboxLost, match=r"gave another answer to call 1\.1"):
        await replay_calls(other, run, lambda call: False, answered)


async def test_a_checkpoint_is_a_record_like_any_other(connect: Connect) -> None:
    """The newest counts; one too large for a message is a claim check, and one whose payload is gone is skipped."""
    admin, bus = await connect("admin"), await connect("rollout")
    log = TurnLog(bus, "r1", "k1", "k1-0-0")
    await log.sampled(turn(0), "n1", "box", "")
    await log.done(0, ())
    await log.checkpoint(0, "n1", b"small")
    await log.sampled(turn(1), "n1", "box", "")
    await log.done(1, ())
    await log.checkpoint(1, "n2", LARGE)
    resume = await TurnLog(bus, "r1", "k1", "k1-0-0").read()
    assert resume.checkpoint == StoredCheckpoint(1, "n2", LARGE)
    await admin.purge("HR_BLOB")
    resume = await TurnLog(bus, "r1", "k1", "k1-0-0").read()
    assert resume.checkpoint == StoredCheckpoint(0, "n1", b"small") and len(resume.turns) == 2


def test_when_a_sandbox_is_kept() -> None:
    schedule = CheckpointSchedule(2, Told())
    train = request("r")
    assert [schedule.due(turn(index), train) for index in range(4)] == [False, True, False, True]
    assert not CheckpointSchedule(0, Told()).due(turn(1), train)
    assert not schedule.due(turn(1), msgspec.structs.replace(train, isolation="group"))
    assert not schedule.due(turn(1), request("r", lane="production"))
    ending = msgspec.structs.replace(turn(1), calls=(ToolCall(id="1.0", name="finish"),))
    assert not schedule.due(ending, train)
