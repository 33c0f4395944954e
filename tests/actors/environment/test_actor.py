"""The environment actor over a real broker: who may use a sandbox, and when it ends."""

import asyncio
import os
import select
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.config import Environment as Section
from headrace.messages.operations import Ack
from headrace.messages.sandbox import (
    ANY_RUN,
    Acquire,
    Acquired,
    Exec,
    Fork,
    Forked,
    Isolation,
    ReadFile,
    Release,
    Renew,
    Role,
    RunTests,
    SandboxCall,
    SandboxReply,
    WriteFiles,
    acquire_method,
)
from headrace.messages.subjects import EVENT, RPC, RPC_NODE
from headrace.messages.tasks import TestPlan
from headrace.sandboxes.client import Sandboxes
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

RUN = "r1"
CONFIG = Config(environment=Section(backend="process", max_vms=3, judge_share=1, slots_per_vm=2, lease_s=30.0))
FILES = {"a.txt": b"one"}


def wanted(
    group: str, slot: int = 0, *, role: Role = "rollout", lane: str = "train", isolation: Isolation = "group"
) -> Acquire:
    return Acquire(
        run=RUN, lane=lane, role=role, group=group, slot=slot, attempt=0, isolation=isolation, files=FILES, lease_s=30.0
    )


def on(held: Acquired, method: str, caller: str = "rollout") -> str:
    return RPC_NODE.at(service="environment", caller=caller, node=held.node, method=method)


def call(held: Acquired, op: ReadFile | WriteFiles | Exec | RunTests, call_id: str = "c1") -> SandboxCall:
    return SandboxCall(sandbox=held.sandbox, secret=held.secret, epoch=held.epoch, call_id=call_id, op=op)


@pytest.fixture
async def client(connect: Connect) -> AsyncIterator[Bus]:
    """A rollout's connection, while an environment actor runs."""
    async with living(Environment, CONFIG, await connect("environment", node="n1"), ANY_RUN):
        yield await connect("rollout")


def acquire(caller: str) -> str:
    return RPC.at(service="environment", caller=caller, method=acquire_method(RUN))


async def take(bus: Bus, request: Acquire) -> Acquired:
    held = await bus.request(acquire(bus.role), request)
    assert isinstance(held, Acquired), held
    return held


async def reply(bus: Bus, held: Acquired, request: SandboxCall) -> SandboxReply:
    answer = await bus.request(on(held, "call", bus.role), request)
    assert isinstance(answer, SandboxReply)
    return answer


async def test_a_second_acquire_takes_the_same_sandbox_away_from_the_first(client: Bus) -> None:
    first = await take(client, wanted("g1"))
    done = await reply(client, first, call(first, WriteFiles(files={"a.txt": b"two"})))
    assert done.result is not None and done.result.ok

    second = await take(client, wanted("g1"))
    assert second.sandbox == first.sandbox
    assert (second.epoch, second.secret != first.secret) == (first.epoch + 1, True)
    old = await reply(client, first, call(first, ReadFile(path="a.txt"), "c2"))
    assert (old.result, old.failure) == (None, "refused")
    new = await reply(client, second, call(second, ReadFile(path="a.txt"), "c2"))
    assert new.result is not None and new.result.data == b"two"


@pytest.mark.parametrize("change", [{"secret": "0" * 32}, {"epoch": 7}, {"secret": ""}])
async def test_a_call_without_the_holders_secret_is_refused(client: Bus, change: dict[str, object]) -> None:
    held = await take(client, wanted("g2"))
    forged = msgspec.structs.replace(call(held, ReadFile(path="a.txt")), **change)
    answer = await reply(client, held, forged)
    assert (answer.result, answer.failure) == (None, "refused")
    release = Release(sandbox=held.sandbox, secret="wrong", epoch=held.epoch)
    freed = await client.request(on(held, "release"), release)
    assert isinstance(freed, Ack) and not freed.ok
    assert (await reply(client, held, call(held, ReadFile(path="a.txt")))).result is not None


async def test_a_secret_of_one_sandbox_opens_no_other(client: Bus) -> None:
    mine, other = await take(client, wanted("g3", 0)), await take(client, wanted("g3", 1))
    forged = msgspec.structs.replace(call(mine, ReadFile(path="a.txt")), sandbox=other.sandbox)
    assert (await reply(client, mine, forged)).failure == "refused"


async def test_a_repeated_call_is_answered_from_the_record(client: Bus) -> None:
    held = await take(client, wanted("g4"))
    append = Exec(argv=("sh", "-c", "echo x >> log; wc -l < log"))
    first = await reply(client, held, call(held, append, "same"))
    again = await take(client, wanted("g4"))
    second = await reply(client, again, call(again, append, "same"))
    assert first.result is not None and second.result is not None
    assert first.result.stdout.strip() == second.result.stdout.strip() == "1"


async def test_acquires_of_one_key_at_the_same_time_share_one_sandbox(client: Bus) -> None:
    held = await asyncio.gather(*(take(client, wanted("g5")) for _ in range(5)))
    assert len({sandbox.sandbox for sandbox in held}) == 1
    assert sorted(sandbox.epoch for sandbox in held) == [1, 2, 3, 4, 5]


async def test_who_asked_last_holds_it_however_long_it_took(client: Bus) -> None:
    """A caller whose first answer is slow asks twice; the second answer's sandbox is the one that it holds."""
    for slot in range(4):
        asked = [asyncio.create_task(take(client, wanted(f"g5{slot // 2}", slot))) for _ in range(3)]
        first, second, last = [await one for one in asked]
        assert (first.epoch, second.epoch, last.epoch) == (1, 2, 3)
        assert (await reply(client, last, call(last, ReadFile(path="a.txt")))).result is not None


async def test_no_room_is_an_answer_and_the_judges_share_is_kept(client: Bus, connect: Connect) -> None:
    for group in ("g6", "g7"):
        await take(client, wanted(group, isolation="episode"))
    full = await client.request(acquire("rollout"), wanted("g8", isolation="episode"))
    assert isinstance(full, SandboxReply) and full.failure == "no_room"
    await take(await connect("judge"), wanted("g8", role="judge", isolation="episode"))


async def test_the_process_backend_never_serves_the_production_lane(client: Bus) -> None:
    answer = await client.request(acquire("rollout"), wanted("g9", lane="production"))
    assert isinstance(answer, SandboxReply) and answer.failure == "refused"


async def test_a_silent_holder_loses_its_sandbox(client: Bus) -> None:
    held = await take(client, msgspec.structs.replace(wanted("g10"), lease_s=0.2))
    live_sandbox = await take(client, wanted("g10", 1))
    async for received in client.follow("HR_EVENT", EVENT.where(run=ANY_RUN, actor="environment", type="event")):
        if received.message.kind == "lease_lapsed":
            break
    assert (await reply(client, held, call(held, ReadFile(path="a.txt")))).failure == "lost"
    renewed = await client.request(on(held, "renew"), Renew(sandbox=held.sandbox, secret=held.secret, epoch=1))
    assert isinstance(renewed, Ack) and not renewed.ok
    assert (await reply(client, live_sandbox, call(live_sandbox, ReadFile(path="a.txt")))).result is not None


async def test_nodes_of_two_runs_on_one_host_are_not_mistaken(connect: Connect) -> None:
    bus = await connect("rollout")
    sandboxes = Sandboxes(bus, 30.0)
    async with (
        living(Environment, CONFIG, await connect("environment", node="host"), "ra"),
        living(Environment, CONFIG, await connect("environment", node="host"), "rb"),
    ):
        held = [
            await sandboxes.acquire(msgspec.structs.replace(wanted(f"g2{number}"), run=run))
            for run in ("ra", "rb")
            for number in range(2)
        ]
        assert [sandbox.node for sandbox in held] == ["host-ra", "host-ra", "host-rb", "host-rb"]
        for sandbox in held:
            assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"one"


async def test_every_operation_leaves_a_line_without_content(client: Bus) -> None:
    held = await take(client, wanted("g11"))
    await reply(client, held, call(held, WriteFiles(files={"b.txt": b"confidential"}), "w1"))
    async for received in client.follow("HR_EVENT", EVENT.where(run=RUN, actor="environment", type="tool_log")):
        line = received.message
        if line.group == "g11":
            break
    assert (line.op, line.brief, line.call_id, line.ok) == ("write_files", "b.txt", "w1", True)
    assert b"confidential" not in received.data


async def test_the_log_names_no_hidden_test(client: Bus, connect: Connect) -> None:
    judge = await connect("judge")
    held = await take(judge, wanted("g13", role="judge"))
    plan = TestPlan(kind="command", argv=("true", "confidential"))
    operations: tuple[ReadFile | WriteFiles | Exec | RunTests, ...] = (
        WriteFiles(files={"tests/test_confidential.py": b"x"}),
        ReadFile(path="confidential"),
        Exec(argv=("echo", "confidential")),
        RunTests(plan=plan),
    )
    for number, op in enumerate(operations):
        await reply(judge, held, call(held, op, f"j{number}"))
    lines: list[str] = []
    async for received in client.follow("HR_EVENT", EVENT.where(run=RUN, actor="environment", type="tool_log")):
        if received.message.group == "g13":
            assert b"confidential" not in received.data
            lines.append(received.message.op)
        if len(lines) == len(operations):
            break
    assert lines == ["write_files", "read_file", "exec", "run_tests"]


async def test_a_stopping_node_ends_its_sandboxes(connect: Connect) -> None:
    bus = await connect("rollout")
    sandboxes = Sandboxes(bus, 30.0)
    async with living(Environment, CONFIG, await connect("environment", node="n2"), ANY_RUN):
        sandbox = await sandboxes.acquire(wanted("g12"))
        assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"one"
        started = await sandbox.call(Exec(argv=("sh", "-c", "sleep 600 & echo $!")))
        ends = os.pidfd_open(int(started.stdout))
    assert select.select([ends], [], [], 30)[0]
    os.close(ends)


async def test_a_fork_needs_the_secret_the_same_lane_and_a_machine(client: Bus) -> None:
    held = await take(client, wanted("g13", isolation="episode"))
    into = (wanted("g13", 1, isolation="episode"),)
    good = Fork(sandbox=held.sandbox, secret=held.secret, epoch=held.epoch, into=into)
    elsewhere = (wanted("g13", 1, lane="production", isolation="episode"),)
    for request, sentence in (
        (msgspec.structs.replace(good, secret="0" * 32), "not the current owner's"),
        (msgspec.structs.replace(good, into=elsewhere), "must have its sandbox's run, lane and role"),
        (good, "process backend"),
    ):
        answer = await client.request(on(held, "fork"), request)
        assert isinstance(answer, SandboxReply) and answer.failure == "refused" and sentence in answer.detail


@pytest.mark.vm
async def test_forks_are_held_like_any_other(connect: Connect) -> None:
    cache = str(ROOT / ".cache" / "headrace")
    section = Section(backend="qemu", cache_dir=cache, max_vms=6, warm=0, lease_s=60.0)
    bus = await connect("rollout")
    async with living(Environment, Config(environment=section), await connect("environment", node="n3"), ANY_RUN):
        alone = wanted("g15", isolation="episode")
        held = await bus.request(
            RPC_NODE.at(service="environment", caller="rollout", node="n3", method="acquire"), alone, timeout=60
        )
        assert isinstance(held, Acquired)
        await reply(bus, held, call(held, WriteFiles(files={"a.txt": b"two"})))
        into = tuple(wanted("g15", slot, isolation="episode") for slot in (1, 2))
        who = {"sandbox": held.sandbox, "secret": held.secret, "epoch": held.epoch}
        forked = await bus.request(on(held, "fork"), Fork(**who, into=into), timeout=60)  # type: ignore[arg-type]
        assert isinstance(forked, Forked) and len({sandbox.secret for sandbox in forked.held}) == 2
        for sandbox in forked.held:
            answer = await reply(bus, sandbox, call(sandbox, ReadFile(path="a.txt")))
            assert answer.result is not None and answer.result.data == b"two"
            assert (await reply(bus, sandbox, call(held, ReadFile(path="a.txt")))).result is not None
            forged = msgspec.structs.replace(call(held, ReadFile(path="a.txt")), sandbox=sandbox.sandbox)
            assert (await reply(bus, sandbox, forged)).failure == "refused"
