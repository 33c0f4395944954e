"""Failures of a host: slots that die, unusual names, unbounded output, many acquires, a full disk."""

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, GroupKey, ListFiles, PullTree, ReadFile, SandboxLost, WriteFiles
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu.clone import Clone
from tests.support.archives import docker_save, file, folder
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

CACHE = str(ROOT / ".cache" / "headrace")


def ask(slot: int = 0, **changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r1", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
    fields["group"] = "g0"
    return Acquire(slot=slot, files={"a.txt": b"one\n"}, **(fields | changes))


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="qemu", cache_dir=CACHE, warm=0))
    yield opened
    await opened.close()


@pytest.mark.vm
@pytest.mark.parametrize("neighbours", [0, 1])
async def test_a_slot_that_ends_is_an_outcome_of_its_own(
    host: Host, monkeypatch: pytest.MonkeyPatch, neighbours: int
) -> None:
    group = f"ends{neighbours}"
    one, *others = [await host.acquire(ask(slot, group=group)) for slot in range(1 + neighbours)]
    machine = host.machine(one.id)
    assert isinstance(machine, Clone)
    await machine.ask({"op": "kill", "slot": one.slot})
    monkeypatch.setattr("headrace.vmhost.protocol.SLACK_S", 0.5)
    assert (await one.call(ReadFile(path="a.txt"))).ended
    monkeypatch.undo()
    assert (await one.call(WriteFiles(files={"a.txt": b"2"}))).ended and await host.acquire(ask(group=group)) is one
    for other in others:
        assert (await other.call(ReadFile(path="a.txt"))).ok
    for sandbox in (one, *others):
        host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", group))


@pytest.mark.vm
async def test_a_machine_that_the_host_stops_is_lost(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await host.acquire(ask(group="stopped"))
    machine = host.machine(sandbox.id)
    assert isinstance(machine, Clone)
    os.kill(machine.pid, signal.SIGSTOP)
    monkeypatch.setattr("headrace.vmhost.protocol.SLACK_S", 0.5)
    monkeypatch.setattr("headrace.vmhost.qemu.clone.PROBE_S", 0.5)
    with pytest.raises(SandboxLost, match="no answer within"):
        await sandbox.call(ReadFile(path="a.txt"))
    host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", "stopped"))


STEALS = """
import ctypes, os, socket, stat, sys
libc, parent = ctypes.CDLL(None), os.getppid()
handle = libc.syscall(434, parent, 0)
for number in os.listdir(f"/proc/{parent}/fd"):
    if stat.S_ISSOCK(os.stat(f"/proc/{parent}/fd/{number}").st_mode):
        taken = libc.syscall(438, handle, int(number), 0)
        if taken >= 0:
            os.write(taken, bytes.fromhex(sys.argv[1]))
"""
"""Takes its keeper's own end of the channel, as nothing keeps it from where there is no isolation, and speaks there."""


@pytest.mark.skipif(os.geteuid() != 0, reason="taking a descriptor from its parent takes root")
@pytest.mark.parametrize(
    "said",
    [b"\0\0\0\x08\0\0\0\x04{}{}", b"\xff" * 4096, b"\0\0\0\x0b\0\0\0\x07" + b'{"i":9}'],
    ids=["no header", "too large", "unasked"],
)
async def test_a_guest_that_speaks_garbage_ends_its_sandbox_alone(said: bytes) -> None:
    here = await Host.open(Environment(backend="process"))
    try:
        one, two = [await here.acquire(ask(slot, group="garbage")) for slot in range(2)]
        ended = await one.call(Exec(argv=("python3", "-c", STEALS, said.hex()), timeout_s=60.0))
        assert ended.ended and not ended.ok and (await two.call(ReadFile(path="a.txt"))).ok
    finally:
        await here.close()


@pytest.mark.vm
async def test_a_sandbox_without_memory_harms_itself_alone(host: Host) -> None:
    one, two = [await host.acquire(ask(slot, group="oom")) for slot in range(2)]
    grow = "x = bytearray()\nwhile True: x += bytes(1 << 20)"
    ended = await one.call(Exec(argv=("python3", "-c", grow), timeout_s=60.0))
    assert not ended.ok and not ended.timed_out
    assert (await two.call(Exec(argv=("echo", "fine")))).stdout == "fine\n"
    assert (await one.call(ReadFile(path="a.txt"))).data == b"one\n"
    for sandbox in (one, two):
        host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", "oom"))


NAMES = ("new\nline", "tab\tand 'quote\"", "-rf", "ünïcode", "*", "a" * 255, "back\\slash", "\x01")


@pytest.mark.parametrize("backend", ["process", pytest.param("qemu", marks=pytest.mark.vm)])
async def test_strange_names_go_in_and_come_out(backend: str) -> None:
    here = await Host.open(Environment(backend=backend, cache_dir=CACHE, warm=0))
    sandbox = await here.acquire(ask(group="names"))
    files = {f"d/{name}": name.encode() for name in NAMES}
    assert (await sandbox.call(WriteFiles(files=files))).ok
    listed = (await sandbox.call(ListFiles(pattern="d/**"))).stdout.split("\n")
    assert len(listed) == len(NAMES) and "d/new\\nline" in listed
    for path, data in files.items():
        assert (await sandbox.call(ReadFile(path=path))).data == data
    assert len((await sandbox.call(PullTree(patterns=("d/**",)))).files) == len(NAMES)
    assert (await sandbox.call(WriteFiles(files={}, delete=tuple(files)))).ok
    assert (await sandbox.call(ListFiles(pattern="d/**"))).stdout == ""
    bad = await sandbox.call(WriteFiles(files={"b" * 300: b""}))
    assert "too long" in bad.error
    await here.close()


def footprint() -> tuple[int, int, int]:
    """Descriptors and children of this process, folders of its sandboxes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    folders = list(Path(tempfile.gettempdir()).glob(f"headrace-{os.getpid()}-*/*"))
    return len(os.listdir("/proc/self/fd")), len(children), len(folders)


def objects() -> int:
    """Objects that Python holds: a released acquire must leave none."""
    gc.collect()
    return len(gc.get_objects())


def anonymous() -> int:
    """KiB of this process's own memory."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


async def many(backend: str, count: int, isolation: str) -> None:
    host = await Host.open(Environment(backend=backend, cache_dir=CACHE, warm=0))

    async def round_of(number: int) -> tuple[int, int, int]:
        for slot in range(count // 10):
            group = f"m{number}-{slot // 8}"
            sandbox = await host.acquire(ask(slot, group=group, isolation=isolation))
            assert (await sandbox.call(ReadFile(path="a.txt"))).ok
            host.release(sandbox.id)
            if slot % 8 == 7 or slot == count // 10 - 1:
                host.release_group(GroupKey("r1", "train", "rollout", group))
        await host.settle()
        async with asyncio.timeout(PATIENCE_S):
            while host._channels or footprint()[2]:  # keepers remove their folders on their way out
                await asyncio.sleep(0.01)
        return footprint()

    try:
        before, held, memory = [(await round_of(number), objects(), anonymous()) for number in range(3)][-1]
        after = [await round_of(number) for number in range(3, 10)][-1]
        assert not host._sandboxes and not host._keys and not host._pool.machines and not host._tasks
        assert after == before and objects() - held < count // 10 and anonymous() - memory < 1024
    finally:
        await host.close()


@pytest.mark.slow
async def test_two_hundred_acquires_leave_nothing_behind() -> None:
    await many("process", 200, "group")


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["group", "episode"])
async def test_a_thousand_machines_leave_nothing_behind(isolation: str) -> None:
    await many("qemu", 1000 if isolation == "group" else 200, isolation)


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_gigabytes_of_output_are_cut(host: Host) -> None:
    sandbox = await host.acquire(ask(group="flood"))
    flood = Exec(argv=("sh", "-c", "head -c 2147483648 /dev/zero; echo end >&2"), timeout_s=600.0, output_cap=1000)
    ended = await sandbox.call(flood)
    assert ended.ok and ended.truncated and len(ended.stdout) == 1000 and ended.stderr == "end\n"
    host.release(sandbox.id)


@pytest.mark.vm
@pytest.mark.slow
async def test_a_killed_parent_takes_twenty_machines_along() -> None:
    code = (
        "import asyncio\nfrom headrace.vmhost.node.host import Host\nfrom headrace.config import Environment\n"
        "from headrace.messages.sandbox import Acquire\n"
        "async def main():\n"
        f"    host = await Host.open(Environment(backend='qemu', cache_dir={CACHE!r}, max_vms=24))\n"
        "    for n in range(20):\n"
        "        await host.acquire(Acquire(run='r', lane='train', role='rollout', group='g', slot=n, attempt=0,"
        " isolation='episode'))\n"
        "    print(*(clone.pid for clone in host._backend._alive), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await asyncio.to_thread(parent.stdout.readline)).split()]
    watches = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) >= 20
    for watch in watches:
        assert select.select([watch], [], [], 20)[0], "a QEMU outlived its parent"
        os.close(watch)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk takes a mount")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    image = docker_save(tmp_path / "a.tar", [[folder("bin"), file("bin/big", bytes(8 << 20))]])
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(VmhostError, match="can't be imported: No space left on device"):
            imported.take(small, image)
        assert [path.name for path in small.iterdir()] == ["lock"]
    finally:
        subprocess.run(["umount", str(small)], check=True)
