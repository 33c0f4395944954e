"""A sandbox that fills itself with processes: calls are answered, the limit is an outcome, the sandbox works again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, OpResult, ReadFile, RunTests, StartJob, WriteFiles
from headrace.messages.tasks import TestPlan
from headrace.vmhost import cgroups
from headrace.vmhost.guest.agent import LIMIT_REACHED
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),  # a bomb takes all of the processor that its sandbox may have
    pytest.mark.skipif(cgroups.places() is None, reason="without control groups nothing bounds root's processes"),
]

CACHE = str(ROOT / ".cache" / "headrace")
# Every process forks until it may not, outlives its parent and leaves its session. It tries again five times a second:
# at a hundred times, hundreds of processes on the host leave nothing to the tests that run beside this one.
BOMB = """
import os, time
if os.getsid(0) != os.getpid():
    os.setsid()
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except BlockingIOError:
        time.sleep(0.2)
"""
CANDIDATE = b"def test_bomb():\n    exec(" + repr(BOMB).encode() + b")\n"


@pytest.fixture(scope="module", params=["process", pytest.param("qemu", marks=pytest.mark.vm)])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend=request.param, cache_dir=CACHE, warm=0, judge_share=0))
    yield opened
    await opened.close()


async def sandbox(host: Host, group: str) -> VmSandbox:
    return await host.acquire(
        Acquire(run="r", lane="train", role="rollout", group=group, slot=0, attempt=0, isolation="group")
    )


async def fills_up(sandbox: VmSandbox) -> OpResult:
    """Call until the bomb has used up what the sandbox may have, and a call fails for it."""
    while (result := await sandbox.call(Exec(argv=("true",), timeout_s=5.0))).ok:
        await asyncio.sleep(0.1)
    return result


async def recovers(sandbox: VmSandbox) -> list[OpResult]:
    """Call until the sandbox works as before; the results on the way. SandboxLost would fail the test."""
    results: list[OpResult] = []
    for _ in range(50):
        results.append(await sandbox.call(Exec(argv=("sh", "-c", "echo fine | cat"), timeout_s=10.0)))
        if results[-1].stdout == "fine\n" and len(results) > 1 and results[-2].stdout == "fine\n":
            break
        await asyncio.sleep(0.1)
    assert results[-1].stdout == "fine\n", results[-1]
    await sandbox.call(WriteFiles(files={"a": b"1"}))
    assert (await sandbox.call(ReadFile(path="a"))).data == b"1"
    return results


# In a microVM each takes some 9 s of processor time; ../qemu/test_isolation.py has the default test of a bomb there.
@pytest.mark.parametrize(
    "host", ["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])], indirect=True
)
async def test_a_command_that_forks_without_end_is_an_outcome(host: Host) -> None:
    attacker = await sandbox(host, "bomb")
    await attacker.call(Exec(argv=("sh", "-c", f"python3 -c '{BOMB}' & sleep 1"), timeout_s=20.0))
    refused = await fills_up(attacker)
    if host.backend == "process":  # a small machine's memory may be used up before its processes are
        assert refused.error == LIMIT_REACHED
    await recovers(attacker)
    host.release(attacker.id)


@pytest.mark.slow  # the command above bounds the same processes in the same way, and costs as much
async def test_a_job_that_forks_without_end_is_an_outcome(host: Host) -> None:
    attacker = await sandbox(host, "job")
    await attacker.call(StartJob(argv=("python3", "-c", BOMB)))
    refused = await fills_up(attacker)
    if host.backend == "process":
        assert refused.error == LIMIT_REACHED
    await recovers(attacker)
    host.release(attacker.id)


@pytest.mark.parametrize(
    "host", ["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])], indirect=True
)
async def test_candidate_code_that_forks_without_end_fails_its_tests(host: Host) -> None:
    attacker = await sandbox(host, "tests")
    await attacker.call(WriteFiles(files={"test_it.py": CANDIDATE}))
    result = await attacker.call(RunTests(plan=TestPlan(paths=("test_it.py",), timeout_s=1.0)))
    assert not result.ok and (result.timed_out or "limit" in result.error or "test process" in result.error)
    await recovers(attacker)
    await attacker.call(WriteFiles(files={"test_it.py": b"def test_fine():\n    pass\n"}))
    assert (await attacker.call(RunTests(plan=TestPlan(paths=("test_it.py",), timeout_s=60.0)))).ok
    host.release(attacker.id)
