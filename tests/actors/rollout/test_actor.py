"""The rollout actor over a real broker and real sandboxes: its records, and what remains after each part is killed."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.turn_log import TurnLog
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.runtime import ack_waits
from headrace.config import Config, Production, Run, Tasks
from headrace.config import Environment as Section
from headrace.judging import rules
from headrace.messages import tasks
from headrace.messages.base import Array, Message
from headrace.messages.operations import Event, Rejected
from headrace.messages.product import CapacityLease
from headrace.messages.rollout import (
    Lane,
    Limits,
    PolicyRef,
    RolloutRequest,
    SlotFailed,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnDone,
    TurnSampled,
)
from headrace.messages.sandbox import ANY_RUN, ToolLog
from headrace.messages.subjects import EVENT, FAIL, TASK, TRAJ, TURN, token
from headrace.tasks import diff as task_diff
from headrace.tasks import open_suite
from headrace.vmhost.channel import ENDED
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.folder_suites import write_suite
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

LIMITS = Limits(max_turns=6, max_tokens=20_000, context_tokens=20_000)
GATED = "gated"
"""A suite whose visible test waits until a file called `gate` lies beside its log."""


def config(folder: Path, **changes: Any) -> Config:
    base = Config(
        run=Run(dir=str(folder)),
        environment=Section(backend="process", lease_s=20.0),
        production=Production(enabled=False),
        tasks=Tasks(dir=str(folder / "suites")),
    )
    return msgspec.structs.replace(base, **changes)


def request(
    run: str, group: str, *, policy: str = "oracle", suite: str = "generated/train", lane: Lane = "train", slot: int = 0
) -> RolloutRequest:
    return RolloutRequest(
        run=run,
        lane=lane,
        group=group,
        slot=slot,
        attempt=0,
        task=tasks.TaskRef(suite, "1" if suite == GATED else open_suite(suite).ids()[0]),
        seed=7,
        policy=PolicyRef(kind="scripted", name=policy),
        limits=LIMITS,
    )


def gated_suite(folder: Path) -> None:
    """Write the gated suite; runs of its visible test leave a line each in `runs.log`."""
    ref = tasks.TaskRef(GATED, "1")
    visible = (
        "import os, time\n\n\ndef test_add():\n"
        f"    with open({str(folder / 'keeper')!r}, 'w') as file:\n        file.write(str(os.getppid()))\n"
        f"    with open({str(folder / 'runs.log')!r}, 'a') as log:\n        log.write('run\\n')\n"
        f"    while not os.path.exists({str(folder / 'gate')!r}):\n        time.sleep(0.02)\n"
    )
    task = tasks.Task(
        ref=ref,
        family="gated",
        prompt="add should add",
        files={"app.py": b"def add(a, b):\n    return a - b\n", "test_visible.py": visible.encode()},
        allowed=("app.py",),
        tests=tasks.TestPlan(paths=("test_visible.py",)),
    )
    oracle = tasks.Oracle(
        ref=ref,
        hidden={"test_hidden.py": b"from app import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"},
        tests=tasks.TestPlan(paths=("test_hidden.py",)),
        expected=("test_hidden.py::test_add",),
        solution={"app.py": b"def add(a, b):\n    return a + b\n"},
    )
    write_suite(GATED, folder / "suites" / GATED, [(task, oracle)], "made by a test")


async def issue(bus: Bus, wanted: RolloutRequest) -> None:
    await bus.publish(TASK.at(run=wanted.run, lane=wanted.lane, suite=token(wanted.task.suite)), wanted)


async def first(bus: Bus, stream: str, subject: str, kind: type[Message]) -> Any:
    """The first message of a type on a subject, waiting for it."""
    async for received in bus.follow(stream, subject):
        if isinstance(received.message, kind):
            return received.message


async def event(bus: Bus, run: str, kind: str) -> Event:
    """The first event of a kind, waiting for it."""
    async for received in bus.follow("HR_EVENT", EVENT.where(run=run, type="event")):
        if received.message.kind == kind:
            message: Event = received.message
            return message
    raise AssertionError(f"no {kind}")


async def waiting(bus: Bus, run: str, lane: Lane = "train") -> RolloutRequest | None:
    """The newest request that is still in the work queue."""
    received = await bus.last("HR_TASK", TASK.where(run=run, lane=lane))
    return None if received is None else received.message


async def queue_is_empty(bus: Bus, run: str) -> None:
    """Wait until every request is settled: acknowledgements are not answered, so there is nothing to wait on."""
    while await waiting(bus, run) is not None:
        await asyncio.sleep(0.02)


async def everything(bus: Bus, stream: str, subject: str) -> list[Any]:
    return [received.message async for received in bus.history(stream, subject)]


@pytest.fixture
async def observer(connect: Connect) -> Bus:
    return await connect("admin")


@pytest.fixture
async def environment(connect: Connect, tmp_path: Path) -> AsyncIterator[Environment]:
    async with living(Environment, config(tmp_path), await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


async def test_scripted_policies_leave_what_they_did(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    policies = {"oracle": "generated/train", "idle": "generated/train", "edit-tests": GATED}
    gated_suite(tmp_path)
    (tmp_path / "gate").touch()
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a1", "roll-1"):
        for policy, suite in policies.items():
            await issue(observer, request("a1", f"g-{policy}", policy=policy, suite=suite))
        ends = {
            policy: await first(observer, "HR_TRAJ", TRAJ.at(run="a1", group=f"g-{policy}"), Trajectory)
            for policy in policies
        }
    oracle = open_suite("generated/train").oracle(open_suite("generated/train").ids()[0])
    assert ends["oracle"].diff == oracle.solution
    assert (ends["idle"].diff, ends["idle"].touched) == ({}, ())
    pushed = rules.pushed(open_suite("generated/train").task(open_suite("generated/train").ids()[0]))
    assert ends["idle"].digest_before == ends["idle"].digest_after == pushed
    assert ends["oracle"].digest_before == ends["idle"].digest_before != ends["oracle"].digest_after
    assert (ends["edit-tests"].diff, ends["edit-tests"].touched) == ({}, ("test_visible.py",))
    for end in ends.values():
        assert (end.outcome, end.rollout, end.backend, end.malformed_calls) == ("finished", "roll-1", "process", 0)
        log = await everything(observer, "HR_TURN", TURN.at(run="a1", trajectory=end.id))
        assert [type(record) for record in log] == [TurnSampled, TurnDone] * len(end.turns)
        assert log[0].turn.results == () and log[0].node == "n1" and log[0].sandbox
        assert [record.results for record in log[1::2]] == [turn.results for turn in end.turns]


async def test_kill_9_between_sampled_and_done_repeats_nothing(
    connect: Connect,
    server: Server,
    environment: Environment,
    tmp_path: Path,
    observer: Bus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gated_suite(tmp_path)
    monkeypatch.setattr(ack_waits, "WORK_S", 1.0)
    script = (
        "import asyncio, msgspec, sys\n"
        "from headrace.bus.runtime import ack_waits\n"
        "from headrace.actors.rollout import actor as rollout\n"
        "from headrace.bus.runtime.supervisor import run_actors\n"
        "from headrace.config import Config\n"
        "ack_waits.WORK_S = 1.0\n"
        "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
        "asyncio.run(run_actors([(rollout.Rollout, 'doomed')], config, 'a2', url=sys.argv[2], credentials=sys.argv[3]))"
    )
    doomed = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        msgspec.json.encode(config(tmp_path)).decode(),
        server.url,
        str(server.credentials),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await issue(observer, request("a2", "g1", suite=GATED))
        sampled = await first(observer, "HR_TURN", TURN.at(run="a2", trajectory="g1-0-0"), TurnSampled)
        while not (tmp_path / "runs.log").exists():
            await asyncio.sleep(0.02)
    finally:
        doomed.kill()
        await doomed.wait()
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a2", "heir"):
        (tmp_path / "gate").touch()
        end = await first(observer, "HR_TRAJ", TRAJ.at(run="a2", group="g1"), Trajectory)
    log = await everything(observer, "HR_TURN", TURN.at(run="a2", trajectory="g1-0-0"))
    turns = [record.turn for record in log if isinstance(record, TurnSampled)]
    assert [turn.index for turn in turns] == [0, 1] and turns[0] == sampled.turn
    assert [call.id for call in end.turns[0].calls] == [call.id for call in sampled.turn.calls]
    assert (tmp_path / "runs.log").read_text() == "run\n"
    assert (end.rollout, end.outcome, set(end.diff)) == ("heir", "finished", {"app.py"})
    assert end.diff["app.py"].count(b"return") == 1


async def test_a_delivery_that_is_repeated_to_its_own_actor_has_the_end_of_the_first(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    gated_suite(tmp_path)
    wanted = request("a9", "g1", suite=GATED)
    queue = TASK.at(run="a9", lane="train", suite=token(GATED))
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a9", "only") as rollout:
        await observer.publish(queue, wanted, msg_id="first")
        while not (tmp_path / "runs.log").exists():
            await asyncio.sleep(0.02)
        await observer.publish(queue, wanted, msg_id="again")
        while rollout._pulls["train"].in_flight < 2:
            await asyncio.sleep(0.02)
        (tmp_path / "gate").touch()
        end = await first(observer, "HR_TRAJ", TRAJ.at(run="a9", group="g1"), Trajectory)
        await queue_is_empty(observer, "a9")
    log = await everything(observer, "HR_TURN", TURN.at(run="a9", trajectory="g1-0-0"))
    assert [type(record) for record in log] == [TurnSampled, TurnDone] * len(end.turns)
    assert (end.outcome, (tmp_path / "runs.log").read_text()) == ("finished", "run\n")
    assert await everything(observer, "HR_LEDGER", FAIL.at(run="a9", group="g1")) == []
    events = await everything(observer, "HR_EVENT", EVENT.where(run="a9", type="event"))
    assert not [event for event in events if event.level != "info"]


async def test_a_lane_that_is_taken_away_is_handed_back_and_another_goes_on(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    gated_suite(tmp_path)
    leases = await (await connect("scavenger")).kv("HR_LEASE")
    await leases.put("a3.lent", CapacityLease(rollout="lent", lanes=("production", "train"), reason="test", since=0.0))
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a3", "lent"):
        await issue(observer, request("a3", "g1", suite=GATED))
        sampled = await first(observer, "HR_TURN", TURN.at(run="a3", trajectory="g1-0-0"), TurnSampled)
        while not (tmp_path / "runs.log").exists():
            await asyncio.sleep(0.02)
        await leases.put("a3.lent", CapacityLease(rollout="lent", lanes=("production",), reason="test", since=1.0))
        await event(observer, "a3", "handed_back")
        back = await waiting(observer, "a3")
        assert back is not None and (back.handovers, back.attempt) == (1, 0)
        (tmp_path / "gate").touch()
        async with living(Rollout, config(tmp_path), await connect("rollout"), "a3", "heir"):
            end = await first(observer, "HR_TRAJ", TRAJ.at(run="a3", group="g1"), Trajectory)
    assert end.rollout == "heir" and end.turns[0].ids == sampled.turn.ids
    assert (tmp_path / "runs.log").read_text() == "run\n"
    assert await everything(observer, "HR_LEDGER", FAIL.at(run="a3", group="g1")) == []
    await queue_is_empty(observer, "a3")


async def test_a_draining_actor_hands_its_requests_back(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    gated_suite(tmp_path)
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a4", "leaving"):
        await issue(observer, request("a4", "g1", suite=GATED))
        await first(observer, "HR_TURN", TURN.at(run="a4", trajectory="g1-0-0"), TurnSampled)
    back = await waiting(observer, "a4")
    assert back is not None and back.handovers == 1


async def test_only_leased_lanes_are_pulled(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    leases = await (await connect("scavenger")).kv("HR_LEASE")
    await leases.put("a5.picky", CapacityLease(rollout="picky", lanes=("eval",), reason="test", since=0.0))
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a5", "picky"):
        await issue(observer, request("a5", "g1", lane="train", policy="idle"))
        await issue(observer, request("a5", "e1", lane="eval", policy="idle"))
        await first(observer, "HR_TRAJ", TRAJ.at(run="a5", group="e1"), Trajectory)
        assert await waiting(observer, "a5") is not None
        await leases.put("a5.picky", CapacityLease(rollout="picky", lanes=("train",), reason="test", since=1.0))
        await first(observer, "HR_TRAJ", TRAJ.at(run="a5", group="g1"), Trajectory)


async def test_a_sandbox_that_its_own_programs_end_is_an_outcome_of_its_attempt(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    gated_suite(tmp_path)
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a6", "roll"):
        await issue(observer, request("a6", "g1", suite=GATED))
        await first(observer, "HR_TURN", TURN.at(run="a6", trajectory="g1-0-0"), TurnSampled)
        while not (tmp_path / "runs.log").exists():
            await asyncio.sleep(0.02)
        keeper = int((tmp_path / "keeper").read_text())
        os.kill(keeper, signal.SIGKILL)
        end = await first(observer, "HR_TRAJ", TRAJ.at(run="a6", group="g1"), Trajectory)
    assert (end.outcome, end.attempt, end.diff) == ("sandbox_limit", 0, {})
    said = [result.output for turn in end.turns for result in turn.results]
    assert any(ENDED in text for text in said), "the policy reads why nothing works any more"
    assert await everything(observer, "HR_LEDGER", FAIL.at(run="a6", group="g1")) == []
    await queue_is_empty(observer, "a6")


@pytest.mark.vm
async def test_a_microvm_that_is_killed_fails_the_slot_and_not_the_policy(
    connect: Connect, tmp_path: Path, observer: Bus
) -> None:
    gated_suite(tmp_path)
    section = Section(backend="qemu", cache_dir=str(ROOT / ".cache" / "headrace"))
    async with (
        living(Environment, config(tmp_path, environment=section), await connect("environment", node="n8"), ANY_RUN),
        living(Rollout, config(tmp_path), await connect("rollout"), "a10", "roll"),
    ):
        await issue(observer, request("a10", "g1", suite=GATED))
        # A test ran in the guest, and the visible test waits for a gate file that is never made.
        await first(observer, "HR_EVENT", EVENT.at(run="a10", actor="environment", type="tool_log"), ToolLog)
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().startswith("qemu"):
                os.kill(int(pid), signal.SIGKILL)
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="a10", group="g1"), SlotFailed)
    assert failed.reason == "sandbox_lost"
    assert await everything(observer, "HR_TRAJ", TRAJ.at(run="a10", group="g1")) == []


async def test_a_tree_that_is_too_large_to_pull_fails_the_slot_and_is_no_empty_diff(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_diff, "PULL_LIMIT", 16)
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a12", "roll-1"):
        await issue(observer, request("a12", "g1", policy="idle"))
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="a12", group="g1"), SlotFailed)
        await queue_is_empty(observer, "a12")
    assert failed.reason == "tree_too_large" and "the workspace holds more than" in failed.detail
    assert not await everything(observer, "HR_TRAJ", TRAJ.at(run="a12", group="g1"))


async def test_a_candidate_that_fills_its_workspace_gets_an_outcome(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this counted as infrastructure, a policy could remove its failures from the baseline."""
    suite = open_suite("generated/train")
    size = {id: sum(map(len, suite.task(id).files.values())) for id in suite.ids()[:20]}
    solved = {id: sum(map(len, (suite.task(id).files | suite.oracle(id).solution).values())) for id in suite.ids()[:20]}
    grows = next(id for id in size if solved[id] > size[id])
    wanted = msgspec.structs.replace(
        request("a13", "g1", policy="oracle"), task=tasks.TaskRef("generated/train", grows)
    )
    monkeypatch.setattr(task_diff, "PULL_LIMIT", size[grows])
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a13", "roll-1"):
        await issue(observer, wanted)
        end = await first(observer, "HR_TRAJ", TRAJ.at(run="a13", group="g1"), Trajectory)
    assert end.outcome == "sandbox_limit" and not end.diff


async def test_work_that_went_with_its_sandbox_is_not_continued_in_a_fresh_one(
    connect: Connect, tmp_path: Path, observer: Bus
) -> None:
    gated_suite(tmp_path)
    wanted = request("a7", "g1", suite=GATED)
    bus = await connect("rollout")
    log = TurnLog(bus, "a7", "g1", wanted.trajectory)
    calls = (ToolCall(id="0.0", name="run_tests"),)
    ids = Array.of([1], "<i4")
    turn = Turn(index=0, segment=0, prompt_ids=ids, ids=ids, logprobs=Array.of([0.0], "<f4"), calls=calls)
    await log.sampled(turn, "n7", "an-earlier-sandbox", "")
    await log.done(0, [ToolResult(call_id="0.0", ok=True, output="fine")])
    await log.flush()
    async with (
        living(Environment, config(tmp_path), await connect("environment", node="n7"), ANY_RUN),
        living(Rollout, config(tmp_path), bus, "a7", "roll"),
    ):
        await issue(observer, wanted)
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="a7", group="g1"), SlotFailed)
    assert failed.reason == "sandbox_lost" and "an-earlier-sandbox" in failed.detail


async def test_a_finished_attempt_is_acknowledged_and_not_run_again(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a8", "roll"):
        await issue(observer, request("a8", "g1", policy="idle"))
        await first(observer, "HR_TRAJ", TRAJ.at(run="a8", group="g1"), Trajectory)
        await issue(observer, request("a8", "g1", policy="idle"))
        await issue(observer, request("a8", "g2", policy="idle"))
        await first(observer, "HR_TRAJ", TRAJ.at(run="a8", group="g2"), Trajectory)
    assert len(await everything(observer, "HR_TRAJ", TRAJ.at(run="a8", group="g1"))) == 1
    assert len(await everything(observer, "HR_TURN", TURN.at(run="a8", trajectory="g1-0-0"))) == 2
    await queue_is_empty(observer, "a8")


async def test_an_unknown_task_is_a_dead_letter(connect: Connect, tmp_path: Path, observer: Bus) -> None:
    wanted = msgspec.structs.replace(request("a9", "g1"), task=tasks.TaskRef("generated/train", "nothing"))
    async with living(Rollout, config(tmp_path), await connect("rollout"), "a9", "roll"):
        await issue(observer, wanted)
        told = await first(observer, "HR_EVENT", EVENT.where(run="a9", actor="rollout", type="rejected"), Rejected)
    assert "nothing" in told.reason
