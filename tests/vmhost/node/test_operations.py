"""Every operation behaves alike on both backends; a sandbox that breaks is lost alone."""

import asyncio
import os
import select
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from headrace.config import Environment
from headrace.judging.rules import pushed
from headrace.messages.sandbox import (
    Acquire,
    Exec,
    GroupKey,
    ListFiles,
    PullTree,
    ReadFile,
    ReplaceLines,
    RunTests,
    SandboxLost,
    Search,
    WriteFiles,
)
from headrace.messages.tasks import Change, Task, TaskRef, TestPlan
from headrace.vmhost import protocol
from headrace.vmhost.backends.process import ProcessBackend
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

FILES = {
    "README.md": b"# tiny\n",
    "tiny/__init__.py": b"",
    "tiny/calc.py": b"def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return add(a, a)\n",
    "tests/test_calc.py": (
        b"from tiny.calc import add, double\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
        b"def test_double():\n    print('seen')\n    assert double(2) == 4\n"
    ),
}
PLAN = TestPlan(paths=("tests/test_calc.py",), timeout_s=10.0)
_CACHE = str(ROOT / ".cache" / "headrace")


def environment(backend: str, **changes: object) -> Environment:
    return Environment(backend=backend, cache_dir=_CACHE, **changes)  # type: ignore[arg-type]


def request(slot: int = 0, group: str = "g000001", **changes: object) -> Acquire:
    fields: dict[str, object] = {"run": "r1", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
    return Acquire(group=group, slot=slot, files=FILES, **(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["process", pytest.param("qemu", marks=pytest.mark.vm)])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    opened = await Host.open(environment(request.param))
    yield opened
    await opened.close()


@pytest.fixture
async def sandbox(host: Host, request: pytest.FixtureRequest) -> AsyncIterator[VmSandbox]:
    taken = await host.acquire(_request(request.node.name))
    yield taken
    host.release(taken.id)


_slots: dict[str, int] = {}


def _request(name: str) -> Acquire:
    """A slot of its own for every test; eight share a machine, as in a run."""
    number = _slots.setdefault(name, len(_slots))
    return request(slot=number, group=f"ops{number // 8}")


async def test_an_episode_goes_from_failing_to_passing_tests(sandbox: VmSandbox) -> None:
    matches = await sandbox.call(Search(pattern=r"return \w+ -"))
    assert matches.stdout == "tiny/calc.py\0002:    return a - b"
    before = await sandbox.call(RunTests(plan=PLAN))
    assert not before.ok and before.error == "2 of 2 tests failed"
    assert [(test.name, test.outcome) for test in before.tests] == [
        ("tests/test_calc.py::test_add", "failed"),
        ("tests/test_calc.py::test_double", "failed"),
    ]
    assert before.tests[0].message == "AssertionError at tests/test_calc.py:5: assert add(1, 2) == 3"
    edited = await sandbox.call(ReplaceLines(path="tiny/calc.py", first=2, last=2, text="    return a + b"))
    assert edited.ok
    after = await sandbox.call(RunTests(plan=PLAN))
    assert after.ok and {test.outcome for test in after.tests} == {"passed"}
    assert after.stdout == "seen\n"
    pulled = await sandbox.call(PullTree(patterns=("tiny/**",)))
    assert pulled.files["tiny/calc.py"].startswith(b"def add(a, b):\n    return a + b\n")
    assert sorted(pulled.files) == ["tiny/__init__.py", "tiny/calc.py"]


async def test_a_slot_waits_for_its_clock(sandbox: VmSandbox) -> None:
    header, bodies = protocol.open_frame({"late.txt": b"x"}, 0)
    header["time"] += 300_000_000
    assert (await sandbox._send(header, bodies, 10.0)).ok
    assert time.time_ns() >= header["time"] - 150_000_000
    age = await sandbox.call(Exec(argv=("stat", "-c", "%Y", "late.txt")))
    assert int(age.stdout) >= (header["time"] - 150_000_000) // 10**9


async def test_files(sandbox: VmSandbox) -> None:
    first = await sandbox.call(PullTree(patterns=()))
    assert (await sandbox.call(ReadFile(path="README.md"))).data == b"# tiny\n"
    cut = await sandbox.call(ReadFile(path="README.md", limit=3))
    assert cut.data == b"# t" and cut.truncated
    missing = await sandbox.call(ReadFile(path="nothing.txt"))
    assert not missing.ok and missing.error == "nothing.txt: No such file or directory"
    for path in ("../x", "/etc/passwd", "a/../../x"):
        refused = await sandbox.call(ReadFile(path=path))
        assert not refused.ok and "may not leave it" in refused.error
    assert (await sandbox.call(WriteFiles(files={"a/b/c.bin": bytes(range(256))}, delete=("tests",)))).ok
    listed = await sandbox.call(ListFiles())
    assert listed.stdout.splitlines() == ["README.md", "a/b/c.bin", "tiny/__init__.py", "tiny/calc.py"]
    assert (await sandbox.call(ListFiles(pattern="*.py"))).stdout.splitlines() == ["tiny/__init__.py", "tiny/calc.py"]
    assert (await sandbox.call(ListFiles(limit=1))).truncated
    assert (await sandbox.call(ReadFile(path="a/b/c.bin"))).data == bytes(range(256))
    second = await sandbox.call(PullTree(patterns=()))
    assert second.digest != first.digest and second.files == {}
    assert (await sandbox.call(PullTree(patterns=()))).digest == second.digest


@pytest.mark.parametrize("entries", [(), (Change("run", "link", 0o777, "README.md"),)])
async def test_the_digest_of_what_was_pushed_is_that_of_a_pull_until_the_first_call(
    host: Host, entries: tuple[Change, ...]
) -> None:
    group = f"digest{len(entries)}"
    asked = request(0, group, entries=entries)
    sandbox = await host.acquire(asked)
    assert (await host.acquire(asked)).digest == sandbox.digest, "a repeated acquire has it too"
    digest = sandbox.digest
    task = Task(ref=TaskRef("s", "t"), family="f", prompt="", allowed=("*",), files=FILES, entries=entries, tests=PLAN)
    assert digest == pushed(task) == (await sandbox.call(PullTree(patterns=()))).digest
    assert sandbox.digest == "", "the workspace may be another now"
    judge = await host.acquire(request(0, group, role="judge"))
    assert judge.digest == ""
    for each in (sandbox, judge):
        host.release(each.id)


async def test_line_edits(sandbox: VmSandbox) -> None:
    await sandbox.call(WriteFiles(files={"t": b"one\ntwo\nthree"}))

    async def after(first: int, last: int, text: str) -> bytes:
        assert (await sandbox.call(ReplaceLines(path="t", first=first, last=last, text=text))).ok
        return (await sandbox.call(ReadFile(path="t"))).data

    assert await after(2, 1, "new") == b"one\nnew\ntwo\nthree"
    assert await after(4, 4, "3") == b"one\nnew\ntwo\n3"
    assert await after(5, 4, "4") == b"one\nnew\ntwo\n3\n4"
    assert await after(1, 3, "") == b"3\n4"
    wrong = await sandbox.call(ReplaceLines(path="t", first=9, last=9, text="x"))
    assert not wrong.ok and wrong.error == "t has 2 lines; lines 9 to 9 cannot be replaced"


async def test_exec(sandbox: VmSandbox) -> None:
    done = await sandbox.call(
        Exec(argv=("sh", "-c", "cat; echo err >&2; echo $X; exit 3"), stdin=b"in\n", env={"X": "7"})
    )
    assert (done.ok, done.code, done.stdout, done.stderr, done.error) == (False, 3, "in\n7\n", "err\n", "exit code 3")
    here = await sandbox.call(Exec(argv=("ls",), cwd="tiny"))
    assert here.stdout.split() == ["__init__.py", "calc.py"]
    absent = await sandbox.call(Exec(argv=("no-such-program",)))
    assert absent.code == 127 and "No such file" in absent.stderr
    flood = await sandbox.call(Exec(argv=("sh", "-c", "yes | head -c 3000000"), output_cap=1000))
    assert flood.ok and flood.truncated and len(flood.stdout) == 1000
    late = await sandbox.call(Exec(argv=("sh", "-c", "echo early; sleep 60"), timeout_s=0.5))
    assert late.timed_out and late.stdout == "early\n" and late.error == "it ran past its time limit"
    background = await sandbox.call(Exec(argv=("sh", "-c", "sleep 60 & echo started")))
    assert background.ok and background.stdout == "started\n"


async def test_code_under_test_cannot_take_the_keeper_along(sandbox: VmSandbox) -> None:
    for body, error in (
        (b"def test_x():\n    import os\n    os._exit(0)\n", "the code under test ended the test process"),
        (b"def test_x():\n    while True: pass\n", "the tests ran past their limit of 0.5 s"),
    ):
        await sandbox.call(WriteFiles(files={"test_x.py": body}))
        result = await sandbox.call(RunTests(plan=TestPlan(paths=("test_x.py",), timeout_s=0.5)))
        assert not result.ok and result.error == error and result.tests == ()
    await sandbox.call(WriteFiles(files={"test_x.py": b"def test_x():\n    pass\n"}))
    assert (await sandbox.call(RunTests(plan=TestPlan(paths=("test_x.py",))))).ok


async def test_broken_test_files_are_errors_with_a_place(sandbox: VmSandbox) -> None:
    await sandbox.call(WriteFiles(files={"test_a.py": b"import nothing_here\n", "test_b.py": b"def f(:\n"}))
    result = await sandbox.call(RunTests(plan=TestPlan(paths=("test_a.py", "test_b.py", "test_c.py"))))
    assert [test.outcome for test in result.tests] == ["error"] * 3
    assert result.tests[0].message.startswith("ModuleNotFoundError at test_a.py:1: import nothing_here: No module")
    assert result.tests[1].message.startswith("SyntaxError at test_b.py:1")
    assert result.tests[2].message.startswith("FileNotFoundError")


async def test_a_test_command_is_judged_by_its_report_or_its_code(sandbox: VmSandbox) -> None:
    script = b"import sys\nopen('r.xml', 'w').write('<s><testcase classname=\"m\" name=\"a\"/></s>')\nsys.exit(0)\n"
    await sandbox.call(WriteFiles(files={"run.py": script}))
    plan = TestPlan(kind="command", argv=("python3", "run.py", "--junitxml=r.xml"))
    result = await sandbox.call(RunTests(plan=plan))
    assert result.ok and [(test.name, test.outcome) for test in result.tests] == [("m::a", "passed")]
    plain = await sandbox.call(RunTests(plan=TestPlan(kind="command", argv=("sh", "-c", "exit 4"))))
    assert not plain.ok and plain.code == 4 and plain.tests[0].outcome == "failed"


async def test_hostile_files_do_not_stall_a_sandbox(sandbox: VmSandbox) -> None:
    await sandbox.call(
        Exec(argv=("sh", "-c", "mkfifo pipe; ln -s /dev/zero zero; ln -s loop loop; ln -s / root; touch 'a\nb'"))
    )
    assert "not a regular file" in (await sandbox.call(ReadFile(path="pipe"))).error
    assert "not a regular file" in (await sandbox.call(ReadFile(path="zero"))).error
    assert not (await sandbox.call(ReadFile(path="loop"))).ok
    assert (await sandbox.call(Search(pattern="return"))).ok
    assert "a\\nb" in (await sandbox.call(ListFiles())).stdout.splitlines()
    pulled = await sandbox.call(PullTree())
    assert pulled.ok and "a\\nb" in pulled.files and "pipe" not in pulled.files


async def test_a_repeated_call_id_is_answered_from_the_record(sandbox: VmSandbox) -> None:
    grow = Exec(argv=("sh", "-c", "echo x >> log; wc -l < log"))
    first = await sandbox.call(grow, "c1")
    assert (await sandbox.call(grow, "c1")) == first
    assert (await sandbox.call(grow, "c2")).stdout.strip() == "2"


async def test_a_seed_repeats_what_a_test_run_draws(host: Host) -> None:
    draws = {"test_draw.py": b"import random\n\n\ndef test_draw():\n    print(random.random(), hash('a'))\n"}
    told = []
    for slot, seed in enumerate((7, 7, 8)):
        sandbox = await host.acquire(request(slot=slot, group="seed", seed=seed))
        await sandbox.call(WriteFiles(files=draws))
        told.append((await sandbox.call(RunTests(plan=TestPlan(paths=("test_draw.py",))))).stdout)
        host.release(sandbox.id)
    host.release_group(GroupKey("r1", "train", "rollout", "seed"))
    assert told[0] == told[1] != told[2] and told[0], told


async def test_a_sandbox_of_the_process_backend_has_pytest_imported_once_one_ran_it() -> None:
    # The time is set where logging is imported, which is by pytest.
    files = {"test_a.py": b"import logging\n\n\ndef test_a():\n    print('imported', repr(logging._startTime))\n"}
    host = await Host.open(environment("process"))
    imported = []
    try:
        for slot in range(3):
            sandbox = await host.acquire(msgspec.structs.replace(request(slot), files=files))
            done = await sandbox.call(RunTests(plan=TestPlan(kind="pytest", paths=("-s", "test_a.py"))))
            assert done.ok, done
            imported.append(next(line for line in done.stdout.splitlines() if line.startswith("imported")))
    finally:
        await host.close()
    first, second, third = imported
    assert first != second == third


async def test_a_package_that_a_plugin_of_pytest_needs_is_tested_itself() -> None:
    """The agent has idna imported, for a plugin; a workspace's own idna has to take its place."""
    tests = b"from idna import MARK\n\n\ndef test_a():\n    assert MARK\n"
    files = {"src/idna/__init__.py": b"MARK = 1\n", "test_a.py": tests}
    host = await Host.open(environment("process"))
    try:
        for slot in range(2):  # the first run imports pytest for the later sandboxes
            sandbox = await host.acquire(msgspec.structs.replace(request(slot), files=files))
            done = await sandbox.call(RunTests(plan=TestPlan(kind="pytest", paths=("test_a.py",))))
            assert done.ok, done
    finally:
        await host.close()


async def test_acquire_is_idempotent_and_a_released_sandbox_refuses(host: Host) -> None:
    asked = request(slot=1, group="idem")
    one = await host.acquire(asked)
    assert await host.acquire(asked) is one
    host.release(one.id)
    with pytest.raises(SandboxLost, match="released"):
        await one.call(ListFiles())
    two = await host.acquire(asked)
    assert two is not one and (await two.call(ReadFile(path="README.md"))).ok
    host.release(two.id)
    host.release_group(GroupKey("r1", "train", "rollout", "idem"))


async def test_the_process_backend_is_refused_on_the_production_lane() -> None:
    host = await Host.open(environment("process"))
    try:
        with pytest.raises(VmhostError, match="lacks the capability isolated"):
            await host.acquire(request(lane="production"))
    finally:
        await host.close()


async def test_closing_the_process_backend_leaves_nothing(tmp_path: Path) -> None:
    host = await Host.open(environment("process"))
    sandbox = await host.acquire(request())
    started = await sandbox.call(Exec(argv=("sh", "-c", "sleep 60 & echo $!")))
    pid = started.stdout.strip()
    assert os.path.exists(f"/proc/{pid}")
    watch = os.pidfd_open(int(pid))
    await host.close()
    assert select.select([watch], [], [], 10)[0], "a background process outlived its sandbox"
    os.close(watch)


async def test_closing_the_process_backend_waits_for_an_agent_that_is_slow_to_end() -> None:
    """The agent was killed with the process that had started it, and what it had started went on."""
    host = await Host.open(environment("process"))
    sandbox = await host.acquire(request())
    background = os.pidfd_open(int((await sandbox.call(Exec(argv=("sh", "-c", "sleep 60 & echo $!")))).stdout))
    warm = cast(ProcessBackend, host._backend)._process.pid
    agent = int(Path(f"/proc/{warm}/task/{warm}/children").read_text())
    ended = os.pidfd_open(warm)
    os.kill(agent, signal.SIGSTOP)
    closing = asyncio.create_task(host.close())
    assert not (await asyncio.to_thread(select.select, [ended], [], [], 1.0))[0], "it left a live agent"
    os.kill(agent, signal.SIGCONT)
    await closing
    assert select.select([background], [], [], 0)[0], "a background process outlived its sandbox"
    for handle in (background, ended):
        os.close(handle)
