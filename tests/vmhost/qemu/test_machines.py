"""Failures of real machines: killed, stalled, flooding, attacked; nothing is left over and only the faulty machine is
lost."""

import asyncio
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.harness.tools.base import Workspace
from headrace.harness.tools.process.lint import LintTool
from headrace.messages.sandbox import (
    Acquire,
    Exec,
    GroupKey,
    ListFiles,
    PullTree,
    ReadFile,
    RunTests,
    SandboxLost,
    WriteFiles,
)
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node import fidelity
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.hosts import CACHE, ask, clone_of, environment
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(environment())
    yield opened
    await opened.close()


@pytest.fixture
async def group(host: Host) -> AsyncIterator[list[VmSandbox]]:
    """Three sandboxes of one machine."""
    name = secrets.token_hex(4)
    taken = [await host.acquire(ask(slot, group=name)) for slot in range(3)]
    yield taken
    for sandbox in taken:
        host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", name))


async def test_slots_do_not_see_each_other(group: list[VmSandbox]) -> None:
    one, two, _ = group
    await one.call(WriteFiles(files={"secret": b"1", "../tmp/x": b""}))
    await one.call(Exec(argv=("sh", "-c", "echo 1 > /tmp/secret; sleep 300 & nc -l -p 999 &")))
    seen = await two.call(Exec(argv=("sh", "-c", "ls /workspace /tmp; ps | grep -c slee[p]; hostname")))
    assert seen.stdout == "/tmp:\n\n/workspace:\na.txt\n0\nsandbox\n"


ATTACKS = (
    "kill -9 1; kill -9 -1",
    "echo x > /opt/headrace/guest/keeper.py",
    "echo x > /usr/lib/python3.11/os.py",
    "mount -t tmpfs none /opt",
    "mount -o remount,rw /",
    "echo x > /dev/kmsg",
    "echo x > /proc/1/mem",
    "echo 0 > /proc/sys/kernel/dmesg_restrict",
    "unshare -U true",
    "cat /proc/1/environ",
    "ls /proc/1/fd",
    "mknod /tmp/port c 240 1",
    "ls /dev/vport*",
    "chown 0 a.txt",
    "su -c true",
)


async def test_attacks_from_inside_a_slot_fail(group: list[VmSandbox]) -> None:
    for attack in ATTACKS:
        script = f"({attack}) > /dev/null 2>&1 && echo done"
        failed = await group[0].call(Exec(argv=("sh", "-c", script), timeout_s=20.0))
        assert "done" not in failed.stdout, attack
        for sandbox in group:
            assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"one\n", attack


async def test_a_keeper_survives_its_tools_and_a_fork_bomb_its_siblings(group: list[VmSandbox]) -> None:
    one, two, _ = group
    bomb = Exec(argv=("sh", "-c", "f() { f | f & }; f; sleep 1"), timeout_s=2.0)
    task = asyncio.create_task(one.call(bomb))
    assert (await two.call(Exec(argv=("echo", "fine")))).stdout == "fine\n"
    await task
    assert (await two.call(ReadFile(path="a.txt"))).data == b"one\n"


REACHES = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
calls = {"add_key": (248, b"user", b"a", b"b", 1, -3), "keyctl": (250, 0, -3, 1), "unshare": (272, 0x10000000)}
calls |= {"bpf": (321, 0, 0, 0), "io_uring": (425, 1, 0), "userfaultfd": (323, 0), "x32": (0x40000000 + 39,)}
print(*(name for name, call in calls.items() if libc.syscall(*call) >= 0 or ctypes.get_errno() != 1))
here = socket.socket(socket.AF_UNIX)
try:
    here.connect(chr(0) + "hr-test")
    print("abstract socket")
except ConnectionRefusedError:
    print("getpid works" if os.getpid() else "")
"""
"""Attacks that namespaces alone leave open, tried from inside."""


async def test_what_namespaces_do_not_separate_is_refused(group: list[VmSandbox]) -> None:
    listens = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'hr-test'); s.listen(); "
    waits = "until grep -q hr-test /proc/net/unix; do sleep 0.05; done"
    one, two, _ = group
    started = Exec(argv=("sh", "-c", f'python3 -c "{listens}time.sleep(60)" & {waits}'))
    assert (await two.call(started)).ok
    found = await one.call(Exec(argv=("python3", "-c", REACHES)))
    assert found.stdout == "\ngetpid works\n", found


@pytest.mark.slow
async def test_a_slot_that_takes_all_memory_is_killed_alone(group: list[VmSandbox]) -> None:
    one, two, _ = group
    hog = "kept = [bytearray(1 << 20) for _ in range(1 << 14)]"
    done, tests = await asyncio.gather(
        one.call(Exec(argv=("python3", "-c", hog))),
        two.call(WriteFiles(files={"test_a.py": b"def test_a():\n    assert sum(range(10)) == 45\n"})),
    )
    assert done.code == -9, done
    assert tests.ok and (await two.call(RunTests(plan=TestPlan(paths=("test_a.py",))))).ok
    assert (await one.call(ReadFile(path="a.txt"))).data == b"one\n"
    groups = [(await box.call(Exec(argv=("cat", "/proc/self/cgroup")))).stdout for box in (one, two)]
    assert groups[0] != groups[1] and all(text.startswith("0::/") and len(text) > 5 for text in groups), groups


async def test_a_full_workspace_is_an_error_of_its_owner(group: list[VmSandbox]) -> None:
    one, two, _ = group
    full = await one.call(WriteFiles(files={"big": b"x" * (40 << 20)}))
    assert not full.ok and "No space left" in full.error
    assert (await two.call(WriteFiles(files={"small": b"x"}))).ok


async def test_output_without_end_is_cut_and_ended(group: list[VmSandbox]) -> None:
    endless = await group[0].call(Exec(argv=("yes",), timeout_s=5.0, output_cap=4096))
    assert endless.timed_out and endless.truncated and len(endless.stdout) == 4096
    assert (await group[0].call(ListFiles())).stdout == "a.txt"


async def test_a_machine_killed_in_a_call_is_lost_at_once_and_the_next_attempt_gets_another(host: Host) -> None:
    sandbox = await host.acquire(ask(group="killed"))
    clone = clone_of(host, sandbox)
    call = asyncio.create_task(sandbox.call(Exec(argv=("sleep", "3600"), timeout_s=3600.0), "c1"))
    await asyncio.sleep(0)
    os.kill(clone.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        async with asyncio.timeout(PATIENCE_S):
            await call
    with pytest.raises(SandboxLost):
        await host.acquire(ask(group="killed"))
    host.release(sandbox.id)
    again = await host.acquire(ask(group="killed", attempt=1))
    assert (await again.call(ReadFile(path="a.txt"))).ok
    host.release(again.id)
    host.release_group(GroupKey("r1", "train", "rollout", "killed"))


async def test_a_machine_that_died_before_it_is_ended_is_still_counted(host: Host) -> None:
    """Its death and the host's kill coincide: the same code must reap the process and read its CPU time."""
    machine = clone_of(host, await host.acquire(ask()))
    os.kill(machine.pid, signal.SIGKILL)
    while Path(f"/proc/{machine.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":  # the loop hears nothing yet
        pass
    machine.kill()
    async with asyncio.timeout(PATIENCE_S):
        await machine.gone


async def test_what_runs_in_a_slot_that_was_left_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.vmhost.qemu.clone.QUIET_S", 0.0)
    one, two = [await host.acquire(ask(slot, group="left")) for slot in range(2)]
    clone = clone_of(host, one)

    async def processes() -> int:
        """Of the whole machine: this one number is not the namespace's."""
        return int((await two.call(Exec(argv=("cat", "/proc/loadavg")))).stdout.split()[3].split("/")[1])

    quiet = await processes()
    await one.call(Exec(argv=("sh", "-c", "for n in 1 2 3 4 5 6 7 8; do sleep 300 & done")))
    assert await processes() >= quiet + 8
    host.release(one.id)
    await asyncio.wait(clone._leaving)
    async with asyncio.timeout(PATIENCE_S):
        while await processes() > quiet:
            pass
    host.release(two.id)
    host.release_group(GroupKey("r1", "train", "rollout", "left"))


@pytest.mark.slow
async def test_clones_differ_in_entropy_and_know_the_time(host: Host) -> None:

    taken = [await host.acquire(ask(group="e", slot=slot, isolation="episode")) for slot in range(3)]
    script = "import os, time; print(os.urandom(16).hex(), time.time())"
    seen = set()
    for sandbox in taken:
        result = await sandbox.call(Exec(argv=("python3", "-c", script)))
        token, clock = result.stdout.split()
        seen.add(token)
        assert abs(float(clock) - time.time()) < 30
        host.release(sandbox.id)
    assert len(seen) == 3


async def test_no_fact_tells_training_from_production(host: Host) -> None:
    """A slot in a group's machine, the same slot of a machine of its own, and a judge's."""
    sheets = []
    for lane, role in (("train", "rollout"), ("production", "rollout"), ("train", "judge")):
        taken = await host.acquire(ask(3, lane=lane, role=role, group="facts", files={"b": b"1", "a": b"2"}))
        sheets.append(await fidelity.sheet(taken))
        assert taken.slot != 0 and f"uid={20100 + taken.slot}(agent)" in sheets[-1]["user"]
        host.release(taken.id)
        host.release_group(GroupKey("r1", lane, "judge" if role == "judge" else "rollout", "facts"))
    assert len(sheets[0]) > 25 and sheets[0]["written"] == "a; b"
    assert fidelity.differences(sheets[0], sheets[1]) == {}
    assert fidelity.differences(sheets[0], sheets[2]) == {}


async def test_a_sandbox_may_ask_for_a_name(host: Host) -> None:
    one, other = await asyncio.gather(
        host.acquire(ask(0, group="named", hostname="build-7")), host.acquire(ask(1, group="named"))
    )
    names = [(await box.call(Exec(argv=("uname", "-n")))).stdout for box in (one, other)]
    assert names == ["build-7\n", "sandbox\n"]
    host.release_group(GroupKey("r1", "train", "rollout", "named"))
    for bad in ("a b", "-a", "a" * 64, "a.b"):
        with pytest.raises(VmhostError, match="expected a host name"):
            await host.acquire(ask(2, group="named", hostname=bad))


async def test_real_packages_run_their_own_pytest_in_the_full_image(host: Host) -> None:
    files = {
        "pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-q'\n",
        "src/pack/__init__.py": b"def double(x):\n    return x + x\n",
        "tests/test_pack.py": (
            b"import pytest\nfrom pack import double\n\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_double(x):\n"
            b"    assert double(x) == 2 * x\n\n\ndef test_wrong():\n    assert double(1) == 3\n"
        ),
    }
    request = Acquire(
        run="r",
        lane="train",
        role="judge",
        group="p",
        slot=0,
        attempt=0,
        isolation="group",
        template="debian",
        files=files,
    )
    sandbox = await host.acquire(request)
    result = await sandbox.call(RunTests(plan=TestPlan(kind="pytest", paths=("tests",), timeout_s=60.0)))
    assert [(test.name, test.outcome) for test in result.tests] == [
        ("tests/test_pack.py::test_double[1]", "passed"),
        ("tests/test_pack.py::test_double[2]", "passed"),
        ("tests/test_pack.py::test_wrong", "failed"),
    ]
    assert "assert 2 == 3" in result.tests[2].message and result.error == "1 of 3 tests failed"
    tools = await sandbox.call(
        Exec(argv=("sh", "-c", "git init -q . && git status --short | wc -l && rg -c double src"))
    )
    assert tools.ok, tools
    await sandbox.call(WriteFiles(files={"src/pack/bad.py": b"import os\nprint(fee)\n"}))
    ref, plan = TaskRef("s", "t"), TestPlan(kind="pytest", paths=("tests",))
    task = Task(ref=ref, family="f", prompt="", files=files, allowed=("src/**",), tests=plan)
    found = await LintTool().run({}, Workspace(sandbox, task, "lint"))
    assert found.output.splitlines() == [
        "src/pack/bad.py:1:8: F401 [*] `os` imported but unused",
        "src/pack/bad.py:2:7: F821 Undefined name `fee`",
    ]
    assert (await sandbox.call(PullTree(patterns=("src/**",)))).ok
    host.release(sandbox.id)
    host.release_group(GroupKey("r", "train", "judge", "p"))


async def test_a_killed_parent_takes_its_machines_along() -> None:
    code = (
        "import asyncio, os, sys\nfrom headrace.vmhost.node.host import Host\nfrom headrace.config import Environment\n"
        "from headrace.messages.sandbox import Acquire\n"
        "async def main():\n"
        f"    host = await Host.open(Environment(backend='qemu', cache_dir={CACHE!r}))\n"
        "    await host.acquire(Acquire(run='r', lane='train', role='rollout', group='g', slot=0, attempt=0,"
        " isolation='group'))\n"
        "    print(*(clone.pid for clone in host._backend._alive), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    pid = int((await asyncio.to_thread(parent.stdout.readline)).split()[0])
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([watch], [], [], 10)[0], "a QEMU outlived its parent"
    os.close(watch)
