"""Real machines that are killed, left or asked for facts: only the faulty machine is lost, and nothing is left over."""

import asyncio
import os
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
    PullTree,
    ReadFile,
    RunTests,
    SandboxLost,
    WriteFiles,
)
from headrace.messages.tasks import Task, TaskRef, TestPlan
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host
from tests.support import fidelity
from tests.support.hosts import CACHE, ask, clone_of, environment
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.records import of

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(environment())
    yield opened
    await opened.close()


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


@pytest.mark.slow  # the full image is built for it, and nothing else of the default suite needs that image
async def test_real_packages_run_their_own_pytest_in_the_full_image(host: Host) -> None:
    files = {
        "pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-q'\n",
        "src/pack/__init__.py": b"def double(x):\n    return x + x\n",
        "tests/test_pack.py": (
            b"import pytest\nfrom pack import double\n\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_double(x):\n"
            b"    assert double(x) == 2 * x\n\n\ndef test_wrong():\n    assert double(1) == 3\n"
        ),
    }
    request = of(Acquire, run="r", role="judge", group="p", template="debian", files=files)
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
    linted = await LintTool().run({}, Workspace(sandbox, task, "lint"))
    assert linted.output.splitlines() == [
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
        f"    host = await Host.open(Environment(backend='qemu', cache_dir={CACHE!r}, warm=0))\n"
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
