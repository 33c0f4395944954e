"""The pool of real machines: who shares one, how many wait ready, and when another does not fit."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.messages.sandbox import Exec, GroupKey, ListFiles, NoCapacity, SandboxLost, WriteFiles
from headrace.vmhost import cgroups
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu.clone import Clone
from tests.support.hosts import ask, backend, clone_of, environment
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(environment())
    yield opened
    await opened.close()


async def test_isolation_decides_who_shares_a_machine(host: Host) -> None:
    vms = host.usage()["vms"]
    asked = [ask(slot, group="share") for slot in range(3)]
    asked += [ask(slot, group="share", isolation="episode") for slot in range(3, 5)]
    taken = [await host.acquire(request) for request in asked]
    assert host.usage()["vms"] == vms + 3
    for sandbox in taken:
        host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", "share"))
    assert host.usage()["vms"] == vms


async def test_a_used_slot_is_never_given_out_again(host: Host) -> None:
    first = await host.acquire(ask(0, group="once"))
    await first.call(WriteFiles(files={"left": b"behind"}))
    host.release(first.id)
    second = await host.acquire(ask(0, group="once", attempt=1))
    assert (await second.call(ListFiles())).stdout == "a.txt"
    host.release(second.id)
    host.release_group(GroupKey("r1", "train", "rollout", "once"))


async def test_the_processor_time_of_machines_is_told_by_lane_and_role(host: Host) -> None:
    before = host.usage()
    burn = Exec(argv=("sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"), timeout_s=60.0)
    taken = await host.acquire(ask(group="spent", isolation="episode", role="judge", lane="eval"))
    await taken.call(burn)
    alive = host.usage()
    host.release(taken.id)
    await host.settle()
    ended = host.usage()
    spent = {name for name in before if name.startswith("vm_cpu_") and ended[name] > before[name] + 50}
    assert spent == {"vm_cpu_ms", "vm_cpu_eval_judge_ms"}
    assert before["vm_cpu_eval_judge_ms"] + 50 < alive["vm_cpu_eval_judge_ms"] <= ended["vm_cpu_eval_judge_ms"]


async def test_a_warm_clone_waits_stopped_and_is_taken_first(host: Host) -> None:
    ready = backend(host)
    await ready.filled()
    parked = ready._waiting("light")
    assert parked is not None
    spent = parked.cpu_ms()
    asked = time.time()
    sandbox = await host.acquire(ask(group="warm"))
    assert clone_of(host, sandbox) is parked and parked not in ready._parked
    seen = await sandbox.call(Exec(argv=("sh", "-c", "stat -c %Y a.txt; ls -A")))
    assert seen.stdout.split()[1:] == ["a.txt"], "the rehearsal leaves nothing"
    assert int(seen.stdout.split()[0]) >= int(asked) - 1, "its clock was set before the first file"
    assert parked.cpu_ms() >= spent
    host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", "warm"))


async def test_a_clone_that_can_not_be_parked_is_ended_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(clone: Clone) -> None:
        raise SandboxLost("it does not rehearse")

    monkeypatch.setattr(Clone, "park", fails)
    told: list[str] = []
    host = await Host.open(environment(), on_event=lambda kind, text, data: told.append(f"{kind}: {text}"))
    try:
        await backend(host).filled()
        await host.settle()
        assert not backend(host).alive() and "warm_clone_lost: it does not rehearse" in told
    finally:
        await host.close()


async def test_a_machine_is_bounded_by_a_group_of_its_own(host: Host) -> None:
    if cgroups.places() is None:
        pytest.skip("no control groups can be had here")
    sandbox = await host.acquire(ask(group="bounded"))
    clone = clone_of(host, sandbox)
    host_group, its = (Path(f"/proc/{pid}/cgroup").read_text() for pid in ("self", clone.pid))
    assert host_group != its and f"/headrace-{os.getpid()}/{clone.pid}\n" in its
    host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", "bounded"))
    await clone.gone
    places = cgroups.places()
    assert places is not None and not any(list(folder.glob(f"headrace-*/{clone.pid}")) for folder in places.folders)


async def test_busy_processors_keep_training_out_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    host = await Host.open(environment(max_vms=4, judge_share=1, warm=0))
    try:
        host.release((await host.acquire(ask(group="a", slot=0))).id)
        monkeypatch.setattr(backend(host)._processors, "busy", lambda: 0.99)
        with pytest.raises(NoCapacity, match=r"use 99% of the processors, and the limit is 95%"):
            await host.acquire(ask(group="b"))
        assert (await host.acquire(ask(group="a", slot=1))).alive, "a group goes on in its machine"
        assert (await host.acquire(ask(group="a", role="judge"))).alive
        assert (await host.acquire(ask(group="u.1", lane="production", isolation="episode"))).alive
    finally:
        await host.close()


async def test_a_template_that_must_be_made_needs_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    host = await Host.open(environment(warm=0))
    monkeypatch.setattr(
        "headrace.vmhost.node.capacity.disk_short", lambda place, size: f"too little disk in {place.name}"
    )
    try:
        with pytest.raises(NoCapacity, match="no capacity for a rollout machine: too little disk in headrace"):
            await host.acquire(ask(group="new", template="debian"))
    finally:
        await host.close()


async def test_no_room_is_said_and_the_judges_share_is_kept() -> None:
    host = await Host.open(environment(max_vms=2, judge_share=1))
    try:
        one = await host.acquire(ask(group="a", isolation="episode"))
        with pytest.raises(NoCapacity, match="1 machines of 1 are in use"):
            await host.acquire(ask(group="b", isolation="episode"))
        judge = await host.acquire(ask(group="a", role="judge"))
        assert (await judge.call(ListFiles())).ok
        host.release(judge.id)  # unused slots are left, but its memory may be needed
        other = await host.acquire(ask(group="b", role="judge"))
        host.release(one.id)
        assert (await host.acquire(ask(group="c", isolation="episode"))).alive
        host.release(other.id)
    finally:
        await host.close()


async def test_users_do_not_wait_for_training() -> None:
    host = await Host.open(environment(max_vms=3, judge_share=1, production_share=1))
    try:
        assert (await host.acquire(ask(group="a", isolation="episode"))).alive
        with pytest.raises(NoCapacity, match="for users and the judge"):
            await host.acquire(ask(group="b", isolation="episode"))
        assert (await host.acquire(ask(group="u.1", lane="production", isolation="episode"))).alive
        with pytest.raises(NoCapacity, match="reserved for the judge"):
            await host.acquire(ask(group="u.2", lane="production", isolation="episode"))
    finally:
        await host.close()


async def test_memory_decides_as_well(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.vmhost.node.capacity.free_mb", lambda: 500.0)
    with pytest.raises(NoCapacity, match="too little memory"):
        await host.acquire(ask(group="hungry", template="debian"))


async def test_a_clone_that_is_killed_while_it_waits_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.vmhost.qemu.backend.CALM_S", 3600.0)
    host = await Host.open(environment(warm=1, judge_share=0))
    try:
        await backend(host).filled()
        [waiting] = backend(host)._parked
        os.kill(waiting.pid, signal.SIGKILL)
        await waiting.gone
        assert backend(host)._parked == []
        async with asyncio.timeout(PATIENCE_S):  # sooner than CALM_S comes only the replacement
            while not backend(host)._parked:
                await asyncio.sleep(0.05)
        assert backend(host)._parked[0].pid != waiting.pid
    finally:
        await host.close()
