"""The memory that clones share cannot be written, and the QEMU processes run as an unprivileged user."""

import asyncio
import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.memory import Memory, sealed
from tests.support.hosts import ask
from tests.support.paths import ROOT

CACHE = str(ROOT / ".cache" / "headrace")
PAGE = 4096


def test_a_sealed_memory_is_mapped_privately_and_written_by_nobody(tmp_path: Path) -> None:
    ram = tmp_path / "ram"
    with ram.open("wb") as file:
        file.truncate(64 * PAGE)
        file.seek(5 * PAGE)
        file.write(b"five")
    memory = sealed(ram, (1,), "t")
    assert sealed(ram, (1,), "t") is memory and sealed(ram, (2,), "t") is not memory
    assert os.pread(memory.fd, 4, 5 * PAGE) == b"five" and os.fstat(memory.fd).st_size == 64 * PAGE
    assert os.fstat(memory.fd).st_blocks * 512 < 16 * PAGE, "holes stay holes"
    again = os.open(memory.path, os.O_RDWR)
    try:
        for change in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 0)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            mmap.mmap(again, PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE)
        with mmap.mmap(again, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[:4] = b"mine"
        assert os.pread(memory.fd, 4, 0) == bytes(4)
    finally:
        os.close(again)


def test_it_closes_with_its_last_user_and_is_saved_with_holes(tmp_path: Path) -> None:
    memory = Memory("t", 64 * PAGE)
    os.pwrite(memory.fd, b"seven", 7 * PAGE)
    memory.save(tmp_path / "ram")
    assert (tmp_path / "ram").read_bytes() == bytes(7 * PAGE) + b"seven".ljust(57 * PAGE, b"\0")
    assert (tmp_path / "ram").stat().st_blocks * 512 < 16 * PAGE
    fd = memory.fd
    del memory
    with pytest.raises(OSError) as closed:
        os.fstat(fd)
    assert closed.value.errno == errno.EBADF
    early = Memory("t", PAGE)
    early.close()
    early.close()
    with pytest.raises(OSError):
        os.fstat(early.fd)


def test_a_template_without_its_memory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(VmhostError, match=r"memory of template t cannot be read from"):
        sealed(tmp_path / "ram", (), "t")


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(900)
async def test_templates_beyond_the_budget_are_dropped_but_never_under_a_clone() -> None:
    dropped: asyncio.Queue[str] = asyncio.Queue()

    def on_event(kind: str, text: str, data: dict[str, Any]) -> None:
        if kind == "template_dropped":
            assert data["freed_mb"] > 0
            dropped.put_nowait(text)

    host = await Host.open(
        Environment(backend="qemu", cache_dir=CACHE, warm=0, template_memory_mb=1), on_event=on_event
    )

    def request(template: str, attempt: int = 0) -> Acquire:
        return ask(group=template, template=template, isolation="episode", attempt=attempt)

    def memories(name: str) -> int:
        """How many memories of that template this process holds."""
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
        return sum(link.startswith(f"/memfd:headrace-{name} ") for link in links)

    try:
        full = await host.acquire(request("debian"))
        light = await host.acquire(request("light"))
        assert (await full.call(Exec(argv=("echo", "up")))).stdout == "up\n" and dropped.empty()
        assert (memories("debian"), memories("light")) == (1, 1)
        host.release(full.id)
        assert "template debian: dropped" in await asyncio.wait_for(dropped.get(), 60.0)
        await host.settle()
        del full  # it refers to its machine, which refers to the memory
        gc.collect()
        assert (memories("debian"), memories("light")) == (0, 1)  # light is the one that is kept warm
        again = await host.acquire(request("debian", 1))
        assert (await again.call(Exec(argv=("echo", "up")))).stdout == "up\n"
        assert (await light.call(Exec(argv=("echo", "up")))).stdout == "up\n"
    finally:
        await host.close()


@pytest.mark.vm
@pytest.mark.anyio
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to give up")
async def test_a_machine_runs_as_nobody_and_sees_no_path() -> None:
    host = await Host.open(Environment(backend="qemu", cache_dir=CACHE, warm=0))
    names = [("a", 0), ("b", 0)]
    held = [
        await host.acquire(
            Acquire(run="r", lane="train", role="rollout", group=g, slot=s, attempt=0, isolation="episode")
        )
        for g, s in names
    ]
    users = set()
    for sandbox in held:
        assert (await sandbox.call(Exec(argv=("echo", "up")))).stdout == "up\n"
        machine = host.machine(sandbox.id)
        assert isinstance(machine, Clone)
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{machine.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        users.add(status["Uid"].split()[0])
        assert len(set(status["Uid"].split())) == 1 and int(status["Uid"].split()[0]) >= 1 << 30
        assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"].strip()) == ("1", "2", "")
        opened = {os.readlink(entry) for entry in Path(f"/proc/{machine.pid}/fd").iterdir()}
        assert not {name for name in opened if name.startswith("/") and not name.startswith(("/memfd:", "/dev/"))} - {
            str(machine.template.state)
        }
    assert len(users) == 2
    await host.close()
