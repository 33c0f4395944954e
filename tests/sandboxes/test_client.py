"""The asking side: which kind of loss it was, waiting for capacity, and a group's slots at one node."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.config import Environment as Section
from headrace.messages.sandbox import (
    ANY_RUN,
    Acquire,
    Exec,
    Isolation,
    NoCapacity,
    ReadFile,
    SandboxKey,
    SandboxLost,
    SandboxRefused,
    SandboxReply,
    acquire_method,
)
from headrace.messages.subjects import RPC
from headrace.sandboxes import calls, client, remote
from headrace.sandboxes.client import NodeSilent, Sandboxes, Superseded
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
from tests.support.records import of

pytestmark = pytest.mark.anyio

CONFIG = Config(environment=Section(backend="process", max_vms=3, judge_share=1, slots_per_vm=2, lease_s=30.0))


def wanted(group: str, slot: int = 0, *, isolation: Isolation = "group") -> Acquire:
    return of(Acquire, run="r1", group=group, slot=slot, isolation=isolation, files={"a.txt": b"one"}, lease_s=30.0)


async def test_a_lost_sandbox_an_ended_one_and_a_superseded_one_are_told_apart(connect: Connect) -> None:
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    async with living(Environment, CONFIG, await connect("environment", node="n3"), ANY_RUN) as node:
        first = await sandboxes.acquire(wanted("g13"))
        second = await sandboxes.acquire(wanted("g13"))
        assert (first.id, first.fresh, second.fresh) == (second.id, True, False)
        with pytest.raises(Superseded):
            await first.call(ReadFile(path="a.txt"))
        ended = await second.call(Exec(argv=("sh", "-c", "kill -9 $PPID")))
        assert (ended.ok, ended.ended) == (False, True)
        assert (await second.call(ReadFile(path="a.txt"))).ended and (
            await sandboxes.acquire(wanted("g13"))
        ).id == second.id
        other = await sandboxes.acquire(wanted("g13-lost"))
        machine = node._host.machine(other.id)
        assert machine is not None
        machine.kill()
        with pytest.raises(SandboxLost) as lost:
            await other.call(ReadFile(path="a.txt"))
        assert not isinstance(lost.value, Superseded | NodeSilent)
        third = await sandboxes.acquire(wanted("g13-lost"))
        assert third.fresh and third.id != other.id


async def test_who_asked_before_a_request_was_handed_on_does_not_take_its_sandbox(connect: Connect) -> None:
    """A holder that gives a request up may still have an acquire under way, and its successor be faster."""
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    async with living(Environment, CONFIG, await connect("environment", node="n12"), ANY_RUN):
        successor = await sandboxes.acquire(msgspec.structs.replace(wanted("g24"), handovers=1))
        with pytest.raises(Superseded, match="hand-over"):
            await sandboxes.acquire(wanted("g24"))
        assert (await successor.call(ReadFile(path="a.txt"))).data == b"one"


async def test_waiting_for_room_ends_when_something_is_given_back(connect: Connect) -> None:
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    async with living(Environment, CONFIG, await connect("environment", node="n4"), ANY_RUN):
        held = [await sandboxes.acquire(wanted(group, isolation="episode")) for group in ("g14", "g15")]
        waiting = asyncio.create_task(sandboxes.acquire(wanted("g16", isolation="episode")))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        sandboxes.give_back(held[0])
        assert (await waiting).fresh
        await sandboxes.close()


async def test_a_released_sandbox_wakes_one_of_the_acquires_that_wait(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it woke all, the requests of n attempts on a full node would grow with the square of n."""
    monkeypatch.setattr(client, "FIRST_WAIT_S", PATIENCE_S)  # so that only a release ends a wait
    monkeypatch.setattr(client, "MOST_WAIT_S", PATIENCE_S)
    observer, asked, count = await connect("environment"), 0, 40

    async def seen(_: object) -> None:
        nonlocal asked
        asked += 1

    await observer.listen_raw(RPC.at(service="environment", caller="rollout", method=acquire_method("r1")), seen)
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    acquired: list[str] = []

    async def attempt(number: int) -> None:
        sandbox = await sandboxes.acquire(wanted(f"full{number}", isolation="episode"))
        acquired.append(sandbox.id)
        await sandboxes.release(sandbox)

    async with living(Environment, CONFIG, await connect("environment", node="n27"), ANY_RUN), asyncio.timeout(60.0):
        await asyncio.gather(*(attempt(number) for number in range(count)))
    await observer.connection.flush()
    assert len(set(acquired)) == count and len(sandboxes) == 0
    assert asked <= 3 * count, asked


async def test_an_acquire_that_is_cancelled_when_it_is_woken_wakes_the_next(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(client, "MOST_WAIT_S", PATIENCE_S)
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    async with living(Environment, CONFIG, await connect("environment", node="n28"), ANY_RUN), asyncio.timeout(60.0):
        held = [await sandboxes.acquire(wanted(group, isolation="episode")) for group in ("g28", "g29")]
        first, second = (
            asyncio.create_task(sandboxes.acquire(wanted(group, isolation="episode"))) for group in ("g30", "g31")
        )
        while len(sandboxes._waiters) < 2:
            await asyncio.sleep(0.01)
        wake = sandboxes._wake

        def cancelled_too(node: str) -> None:
            wake(node)
            first.cancel()  # before it runs again

        monkeypatch.setattr(sandboxes, "_wake", cancelled_too)
        await sandboxes.release(held[0])
        assert (await second).fresh and first.cancelled()


async def test_a_groups_slots_are_asked_for_where_its_first_one_is(connect: Connect) -> None:
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    async with (
        living(Environment, CONFIG, await connect("environment", node="n5"), ANY_RUN),
        living(Environment, CONFIG, await connect("environment", node="n6"), ANY_RUN),
    ):
        for group in ("g17", "g18", "g19"):
            held = await asyncio.gather(*(sandboxes.acquire(wanted(group, slot)) for slot in range(2)))
            assert len({one.node for one in held}) == 1


async def test_a_node_that_is_gone_is_told_apart_from_a_sandbox_that_died(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SILENCE_S", 0.3)
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    async with living(Environment, CONFIG, await connect("environment", node="n7"), ANY_RUN):
        sandbox = await sandboxes.acquire(wanted("g20"))
    with pytest.raises(NodeSilent):
        await sandbox.call(ReadFile(path="a.txt"))
    with pytest.raises(NodeSilent):
        await sandboxes.acquire(wanted("g20"), node="n7")


@pytest.mark.parametrize("started_anew", [False, True])
async def test_a_call_on_a_node_that_dies_does_not_wait_for_its_time_limit(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, started_anew: bool
) -> None:
    for module in (remote, calls):
        monkeypatch.setattr(module, "SILENCE_S", 0.2 if not started_anew else 30.0)
    monkeypatch.setattr(remote, "PULSE_S", 0.2)
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    node = f"died{int(started_anew)}"
    bus = await connect("environment", node=node)
    async with living(Environment, CONFIG, bus, ANY_RUN) as first:
        sandbox = await sandboxes.acquire(wanted("g23"))
        call = asyncio.create_task(sandbox.call(Exec(argv=("sleep", "60"), timeout_s=60.0)))
        lease = first._leases.find(SandboxKey.of(wanted("g23")))
        while lease is not None and not lease.running:
            await asyncio.sleep(0)
        await bus.close()
        async with AsyncExitStack() as stack:
            if started_anew:
                again = await connect("environment", node=node)
                await stack.enter_async_context(living(Environment, CONFIG, again, ANY_RUN))
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(SandboxLost) as lost:
                    await call
    assert isinstance(lost.value, NodeSilent) is not started_anew


async def test_an_answer_that_its_node_may_not_give_any_more_is_asked_for_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The node's connection breaks while a call runs there. The broker refuses an answer on the new connection, as an
    error event, so the node sends none."""
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 1.0)
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    bus = await connect("environment", node="n14")
    refusals: list[str] = []
    again = asyncio.Event()
    bus.connection.on_error.append(refusals.append)
    bus.connection.on_reconnect.append(again.set)
    async with living(Environment, CONFIG, bus, ANY_RUN) as environment:
        sandbox = await sandboxes.acquire(wanted("g25"))
        gate, log = tmp_path / "gate", tmp_path / "log"
        wait = f"echo run >> {log}; while ! test -e {gate}; do sleep 0.02; done; echo through"
        call = asyncio.create_task(sandbox.call(Exec(argv=("sh", "-c", wait)), "c1"))
        while not log.exists():
            await asyncio.sleep(0.02)
        bus.connection.client._transport._io_writer.transport.abort()  # type: ignore[union-attr]
        async with asyncio.timeout(PATIENCE_S):
            await again.wait()
            gate.touch()
            assert (await call).stdout == "through\n"
        assert environment._calls == 1
        await bus.connection.flush()
    assert (log.read_text(), refusals) == ("run\n", [])


async def test_patience_for_room_ends(connect: Connect) -> None:
    sandboxes = Sandboxes(await connect("rollout"), 30.0)
    with pytest.raises(NoCapacity):
        await sandboxes.acquire(wanted("g21"), patience_s=0.3)


async def test_an_acquire_whose_node_dies_is_answered_by_another(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.5)
    sandboxes, dying = Sandboxes(await connect("rollout"), 30.0), await connect("environment", node="n27")
    asked = asyncio.Event()

    async def never(_: object) -> SandboxReply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await dying.respond(RPC.at(service="environment", caller="rollout", method=acquire_method("r1")), never)
    waiting = asyncio.create_task(sandboxes.acquire(wanted("g27"), patience_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
        await dying.close()
        monkeypatch.setattr(client, "ANSWER_S", PATIENCE_S)
        async with living(Environment, CONFIG, await connect("environment", node="n28"), ANY_RUN):
            assert (await waiting).node == "n28"


async def test_a_sandbox_whose_asker_died_before_the_answer_is_ended(connect: Connect) -> None:
    short = Sandboxes(await connect("rollout"), 0.2)
    async with living(Environment, CONFIG, await connect("environment", node="n29"), ANY_RUN) as environment:
        asking = asyncio.create_task(short.acquire(msgspec.structs.replace(wanted("g29"), lease_s=0.2)))
        async with asyncio.timeout(PATIENCE_S):
            while not len(environment._leases):
                await asyncio.sleep(0)
            asking.cancel()
            while len(environment._leases):
                await asyncio.sleep(0.02)


async def test_quiet_sandboxes_are_kept_and_let_go_ones_are_not(connect: Connect) -> None:
    sandboxes = Sandboxes(await connect("rollout"), 0.0)
    async with living(Environment, CONFIG, await connect("environment", node="n9"), ANY_RUN) as environment:
        renewed, left = [await sandboxes.acquire(wanted("g22", slot)) for slot in range(2)]
        before = {lease.sandbox.id: lease.expires for lease in environment._leases._by_id.values()}
        sandboxes.stop_renewing(left)
        await sandboxes.renew()
        after = {lease.sandbox.id: lease.expires for lease in environment._leases._by_id.values()}
        assert after[renewed.id] != before[renewed.id] and after[left.id] == before[left.id]


async def test_a_burst_waits_here_and_not_on_the_way(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_AT_ONCE", 4)

    class Full(Actor):
        """Takes asks, and answers none before four are there."""

        role = "environment"

        async def start(self) -> None:
            self.inside, self.most, self.together = 0, 0, asyncio.Event()
            await self.serve(RPC.at(service="environment", caller="rollout", method=acquire_method("r1")), self.refuse)

        async def refuse(self, request: Acquire) -> SandboxReply:
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.most == 4:
                self.together.set()
            async with asyncio.timeout(PATIENCE_S):
                await self.together.wait()
            self.inside -= 1
            return SandboxReply(failure="refused", detail="no")

    async with living(Full, CONFIG, await connect("environment", node="n19"), "r1") as full:
        sandboxes = Sandboxes(await connect("rollout"), 30.0)
        asked = (sandboxes.acquire(wanted(f"g{number}")) for number in range(12))
        done = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in done] == [SandboxRefused] * 12 and full.most == 4


async def test_a_groups_shared_machine_ends_when_its_group_is_released(connect: Connect) -> None:
    sandboxes = Sandboxes(await connect("judge"), 30.0)
    request = msgspec.structs.replace(wanted("g26"), role="judge")
    async with living(Environment, CONFIG, await connect("environment", node="n26"), ANY_RUN) as environment:
        sandbox = await sandboxes.acquire(request)
        await sandboxes.release(sandbox)
        assert environment._host.usage()["vms"] == 1, "further slots of the group may come"
        await sandboxes.release_group(SandboxKey.of(request).in_group)
        assert environment._host.usage()["vms"] == 0
