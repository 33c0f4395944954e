"""One suite for every backend: what all do, what their capabilities promise, and the refusal of what they lack."""

import asyncio
import gc
import os
import shutil
import signal
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Environment, Sandboxes
from headrace.messages.sandbox import (
    Acquire,
    ApplyChanges,
    Change,
    CheckIntegrity,
    Exec,
    FollowJob,
    ListFiles,
    NoCapacity,
    PullChanges,
    ReadFile,
    SandboxLost,
    StartJob,
    StopJob,
    WriteFiles,
)
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost import cgroups
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base, imported, packages
from headrace.vmhost.node import capacity
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu import probe
from tests.support.archives import Members, docker_save, file, folder, link
from tests.support.hosts import CACHE
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.timeout(600)]
IMAGE = "conformance"
PROGRAMS = ("sh", "cat", "dd", "head", "id", "ln", "ls", "rm", "sleep", "sort", "tail", "wc", "true", "mkdir", "base64")


def make_image(place: Path) -> None:
    owner = {"uid": 1000, "gid": 100}
    layer: Members = [
        folder("bin"),
        file("bin/busybox", probe._busybox(packages.folder(Path(CACHE))), mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in PROGRAMS),
        file("etc/passwd", b"dev:x:1000:100::/home/dev:/bin/sh\n"),
        folder("home/dev", **owner),
        folder("work", **owner),
        file("work/kept", b"as it was\n", **owner),
        file("work/gone", b"for now\n", **owner),
    ]
    saved = docker_save(place / "i.tar", [layer], [f"{IMAGE}:1"], User="dev", WorkingDir="/work")
    imported.take(Path(CACHE), saved, IMAGE)


@pytest.fixture(
    params=[
        "process",
        "container",
        pytest.param("qemu", marks=pytest.mark.slow),
    ]
)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Host]:
    if request.param == "container" and (why := unavailable()):
        pytest.skip(f"no containers here: {why}")
    environment = Environment(backend=request.param, cache_dir=CACHE, warm=0)
    if request.param != "process":
        await asyncio.to_thread(base.ensure, environment)
        await asyncio.to_thread(make_image, tmp_path)
    opened = await Host.open(environment)
    yield opened
    await opened.close()


def request(number: int = 0, **changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "group": f"g{number}", "slot": 0}
    fields |= {"attempt": 0, "isolation": "episode", "template": IMAGE, "files": {"a.txt": b"one\ntwo\n"}}
    return Acquire(**(fields | changes))


async def test_every_backend_does_what_a_sandbox_is_for(host: Host) -> None:
    sandbox = await host.acquire(request())
    assert await host.acquire(request()) is sandbox
    assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"one\ntwo\n"
    done = await sandbox.call(Exec(argv=("sh", "-c", "cat; echo $X >&2; exit 7"), stdin=b"in", env={"X": "err"}))
    assert (done.code, done.stdout, done.stderr) == (7, "in", "err\n")
    slow = await sandbox.call(Exec(argv=("sleep", "600"), timeout_s=0.2))
    assert slow.timed_out
    assert (await sandbox.call(WriteFiles(files={"d/b.txt": b"b"}, delete=("a.txt",)))).ok
    assert "d/b.txt" in (await sandbox.call(ListFiles())).stdout.split()
    assert not (await sandbox.call(ReadFile(path="../../etc/shadow"))).ok
    counted = Exec(argv=("sh", "-c", "echo x >> count; wc -l < count"))
    once, twice = [await sandbox.call(counted, "same") for _ in range(2)]
    assert (once.stdout.strip(), once) == ("1", twice)
    other = await host.acquire(request(1))
    assert not (await other.call(ReadFile(path="d/b.txt"))).ok
    host.release(sandbox.id)
    with pytest.raises(SandboxLost):
        await sandbox.call(ReadFile(path="d/b.txt"))


@pytest.mark.parametrize("terminal", [False, True])
async def test_an_interrupt_ends_what_runs_in_the_foreground(host: Host, terminal: bool) -> None:
    # A shell with job control gives the program a process group of its own.
    sandbox = await host.acquire(request())
    script = "set -m; sh -c 'echo on; sleep 600; echo survived'"
    begun = await sandbox.call(StartJob(argv=("sh", "-c", script), terminal=terminal, timeout_s=300.0))
    assert begun.ok, begun.error
    seen = ""
    while "on" not in seen:
        seen += (await sandbox.call(FollowJob(job=begun.job))).stdout
    assert (await sandbox.call(StopJob(job=begun.job, signal=signal.SIGINT))).ok
    while (ended := await sandbox.call(FollowJob(job=begun.job))).running:
        seen += ended.stdout
        # The program may write before the shell has put its group into the foreground, so a person would press again.
        await sandbox.call(StopJob(job=begun.job, signal=signal.SIGINT))
    assert (ended.timed_out, "survived" in seen) == (False, False)
    assert ended.code in (-signal.SIGINT, 128 + signal.SIGINT)


async def test_a_request_for_what_a_backend_lacks_is_refused_by_name(host: Host) -> None:
    has = host.capabilities
    wanted: dict[str, dict[str, Any]] = {
        "isolated": {"lane": "production"},
        "hostname": {"hostname": "box"},
        "network_list": {"network": ("example.org:80",)},
        "upper_diff": {"requires": ("upper_diff",)},
        "bounded": {"requires": ("bounded",)},
        "kernel_private": {"requires": ("kernel_private",)},
    }
    for number, (name, change) in enumerate(wanted.items()):
        if getattr(has, name):
            host.release((await host.acquire(request(number, **change))).id)
        else:
            with pytest.raises(VmhostError, match=f"lacks the capability .*{name}"):
                await host.acquire(request(number, **change))
    sandbox = await host.acquire(request(99))
    if has.fork:
        await host.fork(sandbox.id, [request(100)])
    else:
        with pytest.raises(VmhostError, match="lacks the capability fork"):
            await host.fork(sandbox.id, [request(100)])
    checked = await sandbox.call(CheckIntegrity())
    assert checked.ok is has.inspect, checked.error


async def test_changes_of_an_image_are_read_and_made_again(host: Host) -> None:
    sandbox = await host.acquire(request(files={}))
    if not host.capabilities.upper_diff:
        assert "upper_diff" in (await sandbox.call(PullChanges())).error
        return
    script = (
        'id -u; rm gone; echo more >> kept; ln -s kept link; mkdir d; echo x > d/x; echo y > "$(printf \'%b\' "$N")"'
    )
    odd = "\\x20odd\\n\\xff"
    done = await sandbox.call(Exec(argv=("sh", "-c", script), env={"N": odd}))
    assert (done.code, done.stdout) == (0, "1000\n"), done
    pulled = await sandbox.call(PullChanges())
    assert {(change.path, change.kind) for change in pulled.changes} == {
        ("gone", "gone"), ("kept", "file"), ("link", "link"), ("d", "folder"), ("d/x", "file"), (odd, "file"),
    }  # fmt: skip
    assert (await sandbox.call(ReadFile(path=odd))).data == b"y\n"
    assert pulled.files == {"kept": b"as it was\nmore\n", "d/x": b"x\n", odd: b"y\n"}
    assert pulled.originals["kept"] == b"as it was\n"
    fresh = await host.acquire(request(1, files={}))
    assert (await fresh.call(ApplyChanges(changes=pulled.changes, files=pulled.files))).ok
    again = await fresh.call(PullChanges())
    assert (again.changes, again.files) == (pulled.changes, pulled.files)
    assert Change("link", "link", 0o777, "kept") in again.changes


async def test_the_limits_of_a_task_hold_or_are_refused_by_name(host: Host) -> None:
    if why := cgroups.lacks(SandboxLimits(vcpus=1, memory_mib=64)):
        pytest.skip(f"no limits here: {why}")
    has = host.capabilities
    if not has.limit_memory:
        with pytest.raises(VmhostError, match=r"lacks the capability .*limit_memory"):
            await host.acquire(request(limits=SandboxLimits(memory_mib=256)))
        return
    limits = SandboxLimits(vcpus=2, memory_mib=256, disk_mib=24 if has.limit_disk else 0)
    one, two = [await host.acquire(request(slot=slot, isolation="group", limits=limits)) for slot in range(2)]
    assert host.machine(one.id) is not host.machine(two.id)
    hog = await one.call(Exec(argv=("sh", "-c", "tail /dev/zero; echo over"), timeout_s=120.0))
    assert hog.code or hog.stdout == "over\n", hog  # the killed program, or its shell with it
    assert (await two.call(ReadFile(path="a.txt"))).ok
    if host.backend == "qemu":
        seen = await two.call(Exec(argv=("sh", "-c", "cat /proc/meminfo /proc/cpuinfo"), timeout_s=120.0))
        total = next(int(line.split()[1]) for line in seen.stdout.splitlines() if line.startswith("MemTotal"))
        cores = min(2, len(os.sched_getaffinity(0)))
        assert total < 256 << 10 and seen.stdout.count("processor\t") == cores
    else:
        assert {("memory", str(256 + (64 if host.backend == "container" else 0) << 20)), ("cpu", "200000")} <= held()
    if has.limit_disk:
        full = await two.call(Exec(argv=("sh", "-c", "dd if=/dev/zero of=full bs=1M; wc -c < full"), timeout_s=120.0))
        assert "No space left" in full.stderr and 20 << 20 < int(full.stdout) <= 24 << 20, full
        with pytest.raises(VmhostError, match=r"the task's disk_mib is 70000, and a disk in .* has at most "):
            await host.acquire(request(2, limits=SandboxLimits(memory_mib=256, disk_mib=70_000)))
        with pytest.raises(VmhostError, match="repository has 1048577 bytes, and its disk_mib is 1"):
            await host.acquire(request(2, limits=SandboxLimits(disk_mib=1), files={"a": bytes((1 << 20) + 1)}))
    else:
        with pytest.raises(VmhostError, match="lacks the capability limit_disk"):
            await host.acquire(request(2, limits=SandboxLimits(disk_mib=24)))
    with pytest.raises(VmhostError, match="this node has"):
        await host.acquire(request(3, limits=SandboxLimits(memory_mib=1 << 22)))


async def test_files_that_exceed_the_memory_lie_on_a_disk_of_the_limits_size(host: Host) -> None:
    if not host.capabilities.limit_disk or cgroups.lacks(SandboxLimits(memory_mib=64)):
        pytest.skip(f"the {host.backend} backend has no limits of memory and disk here")
    size = 220 if host.backend == "qemu" else 100
    limits = SandboxLimits(memory_mib=256 if host.backend == "qemu" else 75, disk_mib=size)
    sandbox = await host.acquire(request(limits=limits))
    disk = weakref.ref(host.machine(sandbox.id).disk)  # type: ignore[union-attr]
    script = "rm gone; mkdir d; echo 1 > d/f; dd if=/dev/zero of=/home/dev/large bs=1M; wc -c < /home/dev/large"
    full = await sandbox.call(Exec(argv=("sh", "-c", script), timeout_s=300.0))
    assert "No space left" in full.stderr and size * 7 // 8 << 20 < int(full.stdout) <= size << 20, full
    removed = await sandbox.call(Exec(argv=("sh", "-c", "rm /home/dev/large; rm -r d; mkdir d; echo 2 > d/f")))
    assert removed.ok and removed.code == 0, removed
    pulled = await sandbox.call(PullChanges())
    assert [(change.path, change.kind) for change in pulled.changes] == [
        ("a.txt", "file"), ("d", "folder"), ("gone", "gone"), ("d/f", "file"),
    ], pulled  # fmt: skip
    fresh = await host.acquire(request(1, files={}, limits=limits))
    assert (await fresh.call(ApplyChanges(changes=pulled.changes, files=pulled.files))).ok
    assert (await fresh.call(PullChanges())).changes == pulled.changes
    if host.capabilities.inspect:
        assert (await fresh.call(CheckIntegrity(thorough=True))).tampered == ()
    if host.capabilities.fork:
        with pytest.raises(VmhostError, match="files lie on a disk cannot be copied"):
            await host.fork(sandbox.id, [request(3, limits=limits)])
    for taken in (sandbox, fresh):
        host.release(taken.id)
    await host.settle()
    gc.collect()
    assert disk() is None, "the file behind the disk is still open"


async def test_a_node_makes_no_disk_for_which_it_lacks_room(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    if not host.capabilities.limit_disk or cgroups.lacks(SandboxLimits(memory_mib=64)):
        pytest.skip(f"the {host.backend} backend has no limits of memory and disk here")
    size = shutil.disk_usage(CACHE).free // (1 << 20) - 1000
    monkeypatch.setattr(capacity, "DISK_RESERVE_MB", 400)
    monkeypatch.setattr(capacity, "DISK_MOST_MB", size)
    held = await host.acquire(request(limits=SandboxLimits(memory_mib=256, disk_mib=size)))
    # The disk is nearly empty, and may still grow to its full size.
    with pytest.raises(NoCapacity, match=r"too little disk is free: 700 MB are needed"):
        await host.acquire(request(1, limits=SandboxLimits(memory_mib=256, disk_mib=700)))
    host.release(held.id)
    await host.settle()
    host.release((await host.acquire(request(1, limits=SandboxLimits(memory_mib=256, disk_mib=700)))).id)


def held() -> set[tuple[str, str]]:
    """The limits of this process's control groups that hold a task's sandbox."""
    places = cgroups.places()
    limits = set()
    for place in places.folders if places else ():
        for path in (place / f"headrace-{os.getpid()}").glob("*/*"):
            if path.name in ("memory.max", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us"):
                limits.add((path.name.split(".")[0], path.read_text().split()[0]))
    return limits


async def test_two_backends_of_one_process_hold_their_own_limits() -> None:
    if why := cgroups.lacks(SandboxLimits(vcpus=1, memory_mib=64)):
        pytest.skip(f"no limits here: {why}")
    hosts = [await Host.open(Environment(backend="process")) for _ in range(2)]
    try:
        for number, host in enumerate(hosts):
            limits = SandboxLimits(memory_mib=192 + number)
            assert (await (await host.acquire(request(limits=limits))).call(ReadFile(path="a.txt"))).ok
        assert {("memory", str(192 << 20)), ("memory", str(193 << 20))} <= held()
    finally:
        for host in hosts:
            await host.close()


async def test_a_task_without_limits_has_those_of_the_configuration() -> None:
    host = await Host.open(Environment(backend="process"), limits=Sandboxes(disk_mib=64))
    try:
        with pytest.raises(VmhostError, match="lacks the capability limit_disk"):
            await host.acquire(request())
    finally:
        await host.close()


@pytest.mark.slow
async def test_bombs_are_outcomes_and_the_neighbour_goes_on(host: Host) -> None:
    if not host.capabilities.bounded:
        pytest.skip(f"the {host.backend} backend promises no limits")
    neighbour = await host.acquire(request(1))
    sandbox = await host.acquire(request())
    forks = await sandbox.call(Exec(argv=("sh", "-c", "bomb() { bomb | bomb & }; bomb; sleep 600"), timeout_s=5.0))
    assert forks.timed_out or forks.code != 0 or forks.error, forks
    memory = await sandbox.call(Exec(argv=("sh", "-c", "tail /dev/zero"), timeout_s=120.0))
    assert memory.code != 0 or memory.error, memory
    disk = await sandbox.call(Exec(argv=("dd", "if=/dev/zero", "of=full", "bs=1M"), timeout_s=300.0))
    assert disk.code != 0 or disk.error, disk
    assert (await sandbox.call(Exec(argv=("rm", "-f", "full"), timeout_s=60.0))).code == 0
    after = await sandbox.call(Exec(argv=("sh", "-c", "echo back"), timeout_s=60.0))
    assert after.stdout == "back\n", after
    assert (await neighbour.call(ReadFile(path="a.txt"))).data == b"one\ntwo\n"


async def test_a_container_sees_neither_the_host_nor_its_neighbour(host: Host) -> None:
    if host.backend != "container":
        pytest.skip("machines have tests of their own, and processes see everything")
    sandbox = await host.acquire(request())
    look = "ls /; ls /proc | sort | head -1; ls -d /proc/[0-9]* | wc -l; ls /sys/class/net; cat /proc/self/mounts"
    seen = (await sandbox.call(Exec(argv=("sh", "-c", look)))).stdout
    assert seen.splitlines()[0] == "bin" and str(ROOT) not in seen and "lowerdir" in seen
    assert "lo" in seen.split() and "eth0" not in seen.split() and "erofs" not in seen
    panic_write = await sandbox.call(
        Exec(argv=("sh", "-c", "echo 1 > /proc/sys/kernel/panic; echo $?; cat /proc/1/environ | wc -c"))
    )
    assert panic_write.stdout.split()[0] == "1"
