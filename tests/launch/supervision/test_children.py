"""Processes of a run: restarted within reason, given up with the end of their log, never orphaned."""

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import process_stat
from headrace.launch.supervision import children
from headrace.launch.supervision.children import Child, ChildFailed, NotStarted, keep_alive
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost import cgroups

pytestmark = pytest.mark.anyio


def child(tmp_path: Path, code: str) -> Child:
    return Child("worker", [sys.executable, "-c", code], tmp_path / "worker.log", dict(os.environ))


def sleeping(tmp_path: Path) -> tuple[Child, Path, list[str]]:
    """A process that sleeps, a pipe that is read at the start of each of its lives, and a list for causes."""
    lives = tmp_path / "alive"
    os.mkfifo(lives)
    return child(tmp_path, f"import time; open({str(lives)!r}, 'w').write('x'); time.sleep(600)"), lives, []


async def test_a_killed_process_comes_back(tmp_path: Path) -> None:
    worker, lives, causes = sleeping(tmp_path)
    watching = asyncio.create_task(keep_alive(worker, lambda _, why: causes.append(why)))
    await asyncio.to_thread(lives.read_text)
    assert worker.process is not None
    first = worker.process.pid
    worker.process.kill()
    await asyncio.to_thread(lives.read_text)
    assert worker.process.pid != first
    assert causes == ["signal 9 (SIGKILL); its log is empty"]
    watching.cancel()
    await worker.stop(5.0)
    assert worker.process.returncode == -signal.SIGTERM


async def test_a_process_that_cannot_start_is_given_up_with_its_log(tmp_path: Path) -> None:
    worker = child(tmp_path, "import sys; print('no broker here', flush=True); sys.exit(3)")
    restarts: list[tuple[str, str]] = []
    with pytest.raises(ChildFailed, match="no broker here") as failed:
        await keep_alive(worker, lambda *restart: restarts.append(restart))
    assert restarts == [] and failed.value.exit_status == 3


@pytest.mark.parametrize(("code", "restarts", "status"), [(1, 2, 1), (2, 0, 2), (4, 2, 4), (6, 2, 3), (9, 2, 1)])
async def test_the_code_of_a_process_decides_whether_it_is_started_again_and_how_the_command_ends(
    tmp_path: Path, code: int, restarts: int, status: int
) -> None:
    """Its log decides nothing: the words of an error may stand in it for any reason."""
    seen: list[tuple[str, str]] = []
    worker = child(tmp_path, f"print('VmhostError: No space left; BusError: away'); raise SystemExit({code})")
    with pytest.raises(ChildFailed) as failed:
        await keep_alive(worker, lambda *restart: seen.append(restart))
    assert (len(seen), failed.value.exit_status) == (restarts, status)


async def test_a_process_that_has_finished_its_work_is_not_started_again(tmp_path: Path) -> None:
    restarts: list[tuple[str, str]] = []
    await keep_alive(child(tmp_path, ""), lambda *restart: restarts.append(restart), finishes=True)
    assert restarts == []
    with pytest.raises(ChildFailed) as failed:
        await keep_alive(
            child(tmp_path, "raise SystemExit(1)"), lambda *restart: restarts.append(restart), finishes=True
        )
    assert (len(restarts), failed.value.exit_status) == (children.BY_ITSELF[0], 1)


async def test_a_process_without_memory_is_given_up_at_its_third_end(tmp_path: Path) -> None:
    """Without this limit it was started twenty times in two minutes, and without end when each life was longer."""
    if why := cgroups.lacks(SandboxLimits(memory_mib=64)):
        pytest.skip(why)
    group = cgroups.create("starved", processes=8, memory_mb=64)
    assert group is not None and not group.refused
    enter = f"[open(file, 'w').write('0') for file in {group.join!r}]"
    worker = child(tmp_path, f"{enter}; b'x' * (1 << 30)")
    restarts: list[tuple[str, str]] = []
    try:
        with pytest.raises(ChildFailed, match=r"SIGKILL\), probably out of memory"):
            await keep_alive(worker, lambda *restart: restarts.append(restart))
    finally:
        group.close()
    assert len(restarts) == 2


async def test_a_process_that_ignores_the_term_signal_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    code = (
        f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(fifo)!r}, 'w').write('x'); time.sleep(600)"
    )
    worker = child(tmp_path, code)
    await worker.start()
    await asyncio.to_thread(fifo.read_text)
    await worker.stop(0.1)
    assert worker.process is not None
    assert worker.process.returncode == -signal.SIGKILL


def test_a_child_that_ignores_signals_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = (
        "import asyncio, os, sys\nfrom pathlib import Path\nfrom headrace.launch.supervision.children import Child\n"
        "async def main():\n"
        "    c = Child('w', [sys.executable, '-c', sys.argv[2]], Path(sys.argv[1]), {})\n"
        "    await c.start()\n    print(c.process.pid, flush=True)\n    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path / "log"), stubborn], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        handle = os.pidfd_open(orphan)
        process.kill()
        process.wait()
        # The descriptor becomes readable when the process ends.
        readable, _, _ = select.select([handle], [], [], 30)
        assert readable, "the child outlived its parent"
        os.close(handle)


async def test_the_log_of_a_talkative_process_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOG_BYTES", 100_000)
    monkeypatch.setattr(children, "LOOK_S", 0.01)
    done = tmp_path / "done"
    os.mkfifo(done)
    code = f"""
import os
for number in range(40):
    print(f"line {{number}} " + "x" * 100_000, flush=True)
    while os.path.getsize({str(tmp_path / "worker.log")!r}) > 100_000:
        pass
print("the end", flush=True)
open({str(done)!r}, "w").write("x")
"""
    worker = child(tmp_path, code)
    watching = asyncio.create_task(keep_alive(worker, lambda *_: None))
    await asyncio.to_thread(done.read_text)
    watching.cancel()
    await worker.stop(5.0)
    assert worker.log.read_text().startswith("the end")
    assert (tmp_path / "worker.log.1").read_text().startswith("line 39 ")
    assert sum(path.stat().st_size for path in tmp_path.glob("worker.log*")) < 300_000


async def test_a_killed_process_leaves_no_child_behind_in_another_group(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    code = (
        "import subprocess, time\np = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        f"open({str(fifo)!r}, 'w').write(str(p.pid))\ntime.sleep(600)"
    )
    worker = child(tmp_path, code)
    await worker.start()
    left_behind = os.pidfd_open(int(await asyncio.to_thread(fifo.read_text)))
    try:
        await worker.stop(0.0)
        assert select.select([left_behind], [], [], 20)[0], "a child in another process group outlived its parent"
    finally:
        os.close(left_behind)


def test_a_rotated_log_keeps_its_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOG_BYTES", 5)
    log = tmp_path / "a.log"
    log.write_bytes(b"0123456789" * 9 + b"the end is")
    children.rotate(log)
    assert (log.read_bytes(), (tmp_path / "a.log.1").read_bytes()) == (b"", b"the end is")


async def test_a_process_that_cannot_be_started_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "worker.log").mkdir()
    with pytest.raises(
        ChildFailed, match=r"^worker could not be started: its log .*worker\.log cannot be opened"
    ) as failed:
        await keep_alive(child(tmp_path, ""), lambda *_: None)
    assert failed.value.exit_status == 3
    absent = Child("worker", [str(tmp_path / "absent")], tmp_path / "log", dict(os.environ))
    with pytest.raises(NotStarted, match=r"absent: No such file or directory$"):
        await absent.start_or_wait()


async def test_a_start_without_file_descriptors_is_tried_again(tmp_path: Path) -> None:
    worker, causes = child(tmp_path, "import time; time.sleep(600)"), list[str]()
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = asyncio.Event()

    def restarted(_: str, why: str) -> None:
        causes.append(why)
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
        refused.set()

    resource.setrlimit(resource.RLIMIT_NOFILE, (3, descriptors[1]))
    try:
        await worker.start_or_wait()
        assert worker.process is None
        watching = asyncio.create_task(keep_alive(worker, restarted))
        await asyncio.wait({watching, asyncio.ensure_future(refused.wait())}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
    while worker.process is None:
        await asyncio.sleep(0.01)
    assert causes == [f"its log {worker.log} cannot be opened (Too many open files)"]
    watching.cancel()
    await worker.stop(5.0)


async def test_a_process_knows_the_folder_of_its_log(tmp_path: Path) -> None:
    worker = child(tmp_path, "import os; print(os.environ['HEADRACE_LOGS'])")
    await worker.start()
    assert worker.process is not None and await worker.process.wait() == 0
    assert worker.log.read_text().strip() == str(tmp_path)


async def test_a_stopped_process_is_killed_and_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOOK_S", 0.02)
    monkeypatch.setattr(children, "STOPPED_S", 0.1)
    worker, lives, causes = sleeping(tmp_path)
    watching = asyncio.create_task(keep_alive(worker, lambda _, why: causes.append(why)))
    await asyncio.to_thread(lives.read_text)
    assert worker.process is not None
    first = worker.process.pid
    os.kill(first, signal.SIGSTOP)
    await asyncio.to_thread(lives.read_text)
    assert worker.process.pid != first
    assert causes == [process_stat.stopped_too_long(first)] and "kill -CONT" in causes[0]
    watching.cancel()
    await worker.stop(5.0)


def test_a_process_that_a_debugger_holds_is_left_alone() -> None:
    # The inner process asks to be traced by its parent and stops itself; the parent never continues it.
    traced = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)"
    outer = (
        f"import os, sys\npid = os.fork()\nif not pid:\n    exec({traced!r})\n"
        "os.waitpid(pid, os.WUNTRACED)\nprint(pid, flush=True)\nsys.stdin.read()"
    )

    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as debugger:
        assert debugger.stdout is not None
        held = int(debugger.stdout.readline())
        stat = process_stat.read(held)
        assert stat is not None and stat.state == "t"
        stops = process_stat.Stops()
        assert [stops.seconds(held, 1.0) for _ in range(3)] == [0.0, 0.0, 0.0]
        os.kill(held, signal.SIGKILL)
        debugger.kill()
