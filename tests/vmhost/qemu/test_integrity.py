"""The host's findings in a machine that was tampered with, and in one that only worked."""

import mmap
import os
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, CheckIntegrity, Exec, RunTests, SandboxLost
from headrace.messages.tasks import TestPlan
from headrace.vmhost import agent_files
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu import integrity, snapshot
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.integrity import PAGE, Fixed, IntegrityCheck
from headrace.vmhost.qemu.memory import Memory
from tests.support.paths import ROOT
from tests.support.touched import fixed, overwrite, page_of

pytestmark = pytest.mark.anyio

CACHE = str(ROOT / ".cache" / "headrace")
NO_OP, SHORT = bytes.fromhex("0f1f440000"), bytes.fromhex("6690")
TEXT = 4
"""First page of the text below; it has two."""
AT, NEAR, ACROSS = TEXT * PAGE + 100, TEXT * PAGE + 200, (TEXT + 1) * PAGE - 2
"""Branches: a long one, a short one, and one that lies in two pages."""


def jump(distance: int) -> bytes:
    return b"\xe9" + struct.pack("<i", distance - 5)


class Guest:
    """This process, mapping a template's memory as a machine would."""

    def __init__(self) -> None:
        self.template = Memory("template", 256 * PAGE)
        os.pwrite(self.template.fd, b"x" * 8 * PAGE, 0)
        for place, code in ((AT, jump(1000)), (NEAR, SHORT), (ACROSS, NO_OP)):
            os.pwrite(self.template.fd, code, place)
        self.memory = mmap.mmap(self.template.fd, 256 * PAGE, flags=mmap.MAP_PRIVATE)
        sites = [(AT, AT + 1000), (NEAR, NEAR + 50), (ACROSS, ACROSS - 70)]
        ranges = [(1, 2, 1), (3, 1, 0), (200, 1, 2)]
        self.check = IntegrityCheck(
            Fixed(
                names=("kernel", "/a", "/b"),
                ranges=np.array(ranges, "<u4").tobytes(),
                text=(TEXT, 2),
                sites=np.array(sites, "<i8").tobytes(),
                condition={"modules": "virtio", "mounts": "none"},
            )
        )

    def look(self) -> tuple[str, ...]:
        low, _ = snapshot.mapping(os.getpid(), self.template.mapped)
        return self.check.check(os.getpid(), low, self.template.fd)

    def write(self, place: int, data: bytes) -> None:
        self.memory[place : place + len(data)] = data


@pytest.fixture
def guest() -> Iterator[Guest]:
    made = Guest()
    yield made
    made.memory.close()
    made.template.close()


def test_reading_and_honest_writing_are_seen_as_nothing(guest: Guest) -> None:
    assert sum(guest.memory[::PAGE]) and guest.look() == ()
    for page in (0, 6, 7, 199, 201, 255):
        guest.write(page * PAGE, b"mine")
    assert guest.look() == ()


def test_a_page_that_was_written_is_named_also_when_it_was_put_back(guest: Guest) -> None:
    guest.write(2 * PAGE + 7, b"!")
    assert guest.look() == ("/a",)
    guest.write(2 * PAGE + 7, b"x")
    assert guest.look() == ("/a",)
    guest.write(200 * PAGE, b"!")
    guest.write(3 * PAGE, b"!")
    assert guest.look() == ("/a", "/b", "kernel")


@pytest.mark.parametrize(
    ("place", "code", "right"),
    [
        (AT, NO_OP, True),
        (AT, b"\xcc" + NO_OP[1:], True),
        (AT, jump(1001), False),
        (AT, NO_OP + b"y", False),
        (AT - 1, b"y", False),
        (AT + 5, b"y", False),
        (NEAR, b"\xeb\x30", True),
        (NEAR, b"\xeb\x31", False),
        (NEAR, NO_OP, False),
        (ACROSS, jump(-70), True),
        (ACROSS, jump(-71), False),
        (TEXT * PAGE, b"y", False),
        (TEXT * PAGE, b"x", True),
    ],
)
def test_the_kernels_text_changes_in_its_branches_alone(guest: Guest, place: int, code: bytes, right: bool) -> None:
    guest.write(place, code)
    assert guest.look() == (() if right else ("kernel",))


def test_a_condition_is_compared_by_name(guest: Guest) -> None:
    assert guest.check.differences({"modules": "virtio", "mounts": "none"}) == ()
    assert guest.check.differences({"modules": "virtio evil", "more": ""}) == ("modules", "more", "mounts")


def test_a_process_that_is_gone_can_not_be_looked_at(guest: Guest) -> None:
    with pytest.raises(VmhostError, match="memory cannot be read"):
        guest.check.check(2**22 + 1, 0, guest.template.fd)


def reported(ram: Path, **changes: Any) -> dict[str, Any]:
    """As a machine of 4 MiB would that has one MiB above 4 GiB."""
    agent = agent_files.sources()["frames.py"]
    with ram.open("wb") as out:
        out.truncate(4 << 20)
        out.seek(3 * PAGE)
        out.write(agent)
        out.seek(0x201000)
        # where, where to, key: relative to where they stand; the second is not in the text.
        out.write(struct.pack("<iiqiiq", 0x1000 + 16, 0x2000, 0, -0x100000, 0, 0))
    memory = ["00000000-002fffff : System RAM", "100000000-1000fffff : System RAM"]
    memory += ["200000-2027ff : Kernel code", "280000-280fff : Kernel rodata"]
    base = 0xFFFFFFFF81000000
    symbols = {"_text": base, "__start___jump_table": base + 0x1000, "__stop___jump_table": base + 0x1020}
    files = [["/opt/headrace/guest/frames.py", [3, 2]], ["/b", [0x100000, 1, 9, 1]]]
    return {"files": files, "memory": memory, "symbols": symbols} | changes


def test_a_survey_becomes_places_in_the_memory_file(tmp_path: Path) -> None:
    ram = tmp_path / "ram"
    made = integrity.fixed(reported(ram), {"modules": "virtio"}, ram)
    assert made.names == ("kernel", "/opt/headrace/guest/frames.py", "/b")
    table = np.frombuffer(made.ranges, "<u4").reshape(-1, 3).tolist()
    assert table == [[3, 2, 1], [9, 1, 2], [0x280, 1, 0], [0x300, 1, 2]]
    assert made.text == (0x200, 3)
    assert np.frombuffer(made.sites, "<i8").tolist() == [0x202010, 0x203004]
    silent = integrity.fixed(reported(ram, symbols={}), {}, ram)
    assert (silent.text, silent.sites) == ((0, 0), b"")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [["/opt/headrace/guest/frames.py", [4, 2]]]},
        {"files": [["/b", [1]]]},
        {"files": [["/b", [3000, 1]]]},
        {"files": 5},
        {"memory": ["00000000-002fffff : System RAM"]},
        {"memory": []},
        {"symbols": {"_text": 0xFFFFFFFF81000000}},
    ],
)
def test_a_survey_that_does_not_fit_the_memory_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    ram = tmp_path / "ram"
    with pytest.raises(VmhostError, match="cannot be mapped to files"):
        integrity.fixed(reported(ram, **changes), {}, ram)


# -- real machines -------------------------------------------------------------------------------------------------

FILES = {
    "a.py": b"def f(x):\n    return x + 1\n",
    "test_a.py": b"from a import f\n\n\ndef test_f():\n    assert f(1) == 2\n",
}
SWITCHES = "import socket; s = socket.socket(2, 2); s.setsockopt(1, 29, 1); s.bind(('127.0.0.1', 0)); print('on')"
"""SO_TIMESTAMP makes the kernel rewrite branches in its text."""


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="qemu", cache_dir=CACHE, max_vms=3, warm=0))
    yield opened
    await opened.close()


async def two(host: Host, group: str) -> tuple[VmSandbox, VmSandbox, Clone]:
    """Neighbours in one machine, which has worked."""
    fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "judge", "attempt": 0, "isolation": "group"}
    one, other = [await host.acquire(Acquire(group=group, slot=slot, files=FILES, **fields)) for slot in range(2)]
    assert (await one.call(RunTests(plan=TestPlan(paths=("test_a.py",))))).ok
    clone = host.machine(one.id)
    assert isinstance(clone, Clone)
    return one, other, clone


@pytest.mark.vm
async def test_honest_work_is_clean_also_where_it_changes_the_kernels_text(host: Host) -> None:
    one, other, clone = await two(host, "honest")
    ran = await other.call(Exec(argv=("python3", "-c", SWITCHES)))
    assert ran.stdout == "on\n"
    low, _ = snapshot.mapping(clone.pid, clone._memory.mapped)
    written = clone.template.integrity._written(clone.pid, low)
    assert written and {owner for _, owner in written} == {-1}, "the kernel has switched some branches"
    for thorough in (False, True):
        looked = await one.call(CheckIntegrity(thorough=thorough))
        assert looked.ok and looked.tampered == ()
    for sandbox in (one, other):
        host.release(sandbox.id)


@pytest.mark.vm
async def test_a_file_changed_behind_its_metadata_and_a_changed_kernel_are_named(host: Host) -> None:
    one, other, clone = await two(host, "touched")
    page = page_of(clone, "/etc/hostname")
    before = overwrite(clone, page, b"touched")
    assert (await other.call(Exec(argv=("cat", "/etc/hostname")))).stdout == "touched\n"
    for sandbox in (one, other):
        assert (await sandbox.call(CheckIntegrity())).tampered == ("/etc/hostname",)
    overwrite(clone, page, before)
    assert (await other.call(Exec(argv=("cat", "/etc/hostname")))).stdout == "sandbox\n"
    assert (await one.call(CheckIntegrity(thorough=True))).tampered == ("/etc/hostname",)
    kernel = fixed(clone)
    middle = kernel.text[0] + kernel.text[1] // 2
    here = os.pread(clone._memory.fd, 1, middle * PAGE)
    overwrite(clone, middle, bytes([here[0] ^ 1]))
    assert (await one.call(CheckIntegrity())).tampered == ("/etc/hostname", "kernel")
    clone.kill()
    await clone.gone
    with pytest.raises(SandboxLost):
        await one.call(CheckIntegrity())
    for sandbox in (one, other):
        host.release(sandbox.id)


@pytest.mark.vm
async def test_a_copy_of_a_touched_machine_can_not_be_told_from_its_template(host: Host) -> None:
    fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "judge", "attempt": 0, "isolation": "episode"}
    box = await host.acquire(Acquire(group="copied", slot=0, **fields))
    honest, odd = list[VmSandbox](), list[VmSandbox]()
    for slot, copies in ((1, honest), (2, odd)):
        copies += await host.fork(box.id, [Acquire(group="copied", slot=slot, **fields)])
        clone = host.machine(box.id)
        assert isinstance(clone, Clone)
        overwrite(clone, page_of(clone, "/etc/hostname"), b"touched")
    assert (await honest[0].call(CheckIntegrity())).ok
    looked = await odd[0].call(CheckIntegrity())
    assert not looked.ok and looked.tampered == () and "did not begin as its template" in looked.error
    for sandbox in (box, *honest, *odd):
        host.release(sandbox.id)


async def test_the_process_backend_says_that_it_can_not_tell() -> None:
    host = await Host.open(Environment(backend="process"))
    try:
        request = Acquire(run="r", lane="train", role="judge", group="g", slot=0, attempt=0, isolation="group")
        looked = await (await host.acquire(request)).call(CheckIntegrity())
        assert not looked.ok and looked.tampered == () and "lacks the capability inspect" in looked.error
    finally:
        await host.close()
