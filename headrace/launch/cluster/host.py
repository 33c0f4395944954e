"""The commands of one host: `python -m headrace.launch.cluster.host start|stop|status` in its folder, called by ssh.

`start` reads the host's files from standard input and returns when the broker of the host answers and every process has
been started. A launcher that is killed leaves each host either as it was or started: `start` begins after it has
received every byte and does not need the connection from then on. So a second launch with the same files takes over
the hosts that run already, and `stop` ends those that are being started as well.
"""

import io
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from headrace.bus.broker.server import refuse_busy_port
from headrace.bus.errors import BusError
from headrace.launch.cluster.file import name_of
from headrace.launch.cluster.keeper import READY_FD, keep, load
from headrace.launch.cluster.plan import Order
from headrace.launch.cluster.state import LOG, LOGS, State, held, lock_of, read_state, write_state
from headrace.launch.output import complain, say
from headrace.launch.runs import RunError
from headrace.launch.supervision.causes import last_words
from headrace.python_modules import module_command

MODULE = "headrace.launch.cluster.host"
STARTED, TAKEN = "started", "taken over"
"""Answers of `start`."""
BUSY = 5
"""Exit code where a keeper runs with other files."""
READY_S = 180.0
END_S = 90.0
"""Seconds for a stop: the drain, then the kernel's time to end killed processes."""


def _missing(order: Order) -> str:
    """Name the first thing that this host lacks, in one sentence; empty when it has everything."""
    if order.page is not None:
        for host, port, key in (
            (order.page.host, order.page.port, "[dashboard] port"),
            (order.page.websocket_host, order.page.websocket_port, "[dashboard] websocket"),
        ):
            try:
                refuse_busy_port(host, port, key)
            except BusError as error:
                return str(error)
    for process in order.processes:
        for device in process.devices:
            if not Path(f"/dev/nvidia{device}").exists():
                return f"process {name_of(process)} wants device {device}, and there is no /dev/nvidia{device}"
    return ""


def start(folder: Path, files: str, archive: bytes) -> str:
    """Start the keeper and return when every process runs; take over one that runs with the same files. RunError."""
    if sha256(archive).hexdigest() != files:
        raise RunError("the host's files arrived incomplete; launch again", 3)
    deadline = time.monotonic() + READY_S
    while (lock := lock_of(folder)) < 0:
        if _taken(folder, files, deadline):
            return TAKEN
    try:
        _begin(folder, files, archive, lock)
    finally:
        os.close(lock)
    return STARTED


def _taken(folder: Path, files: str, deadline: float) -> bool:
    """Whether the keeper runs with these files; False after a moment while it begins or ends. RunError."""
    state = read_state(folder)
    if state.state in ("starting", "running") and state.files != files:
        raise RunError(
            f"a keeper (process {state.pid}) runs in {folder} already, with other files; stop it first", BUSY
        )
    if state.state == "running":
        return True
    if time.monotonic() > deadline:
        raise RunError(f"process {state.pid} has been {state.state} for {READY_S:g} s; see {folder / LOGS}", 3)
    _ended(state.pid, 0.1)
    return False


def _begin(folder: Path, files: str, archive: bytes, lock: int) -> None:
    """Write the host's files, start the keeper with the lock and wait until its processes run. RunError."""
    write_state(folder, State(pid=os.getpid(), state="starting", files=files))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    missing = _missing(load(folder))
    if missing:
        write_state(folder, State(state="failed", error=missing))
        raise RunError(missing, 3)
    (folder / LOGS).mkdir(exist_ok=True)
    readable, writable = os.pipe()
    with (folder / LOGS / LOG).open("ab") as log:
        child = subprocess.Popen(
            module_command(MODULE, "keep", files),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(writable, lock),
            env=os.environ | {READY_FD: str(writable)},
        )
    os.close(writable)
    # The pipe closes when the keeper ends, so its failure is seen at once.
    done = select.select([readable], [], [], READY_S)[0]
    if done and os.read(readable, 1):
        return
    if not done:
        child.kill()
        raise RunError(f"its processes did not start within {READY_S:g} s; see {folder / LOGS}", 3)
    child.wait()
    state = read_state(folder)
    raise RunError(state.error or last_words(folder / LOGS / LOG) or "its keeper ended without writing a cause", 3)


def stop(folder: Path) -> None:
    """End the keeper and its processes, and a `start` that is under way; nothing happens where none is. RunError."""
    for pid in _starting(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadlines = {signal.SIGTERM: time.monotonic() + END_S, signal.SIGKILL: time.monotonic() + 2 * END_S}
    told: set[tuple[int, signal.Signals]] = set()
    while held(folder):
        pid = read_state(folder).pid
        number = next((each for each, until in deadlines.items() if time.monotonic() < until), None)
        if number is None:
            raise RunError(f"process {pid} does not end; see {folder / LOGS / LOG}", 3)
        if (pid, number) not in told and MODULE in _command(pid):
            told.add((pid, number))
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        # A keeper that was just started has not written its number yet.
        _ended(pid, 0.1)


def _starting(folder: Path) -> list[int]:
    """Process ids of every `start` of this folder, also before it has taken the lock."""
    mark, place = f"{MODULE} start", str(folder)
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and mark in (words := _command(int(entry.name))):
            with suppress(OSError):
                if f"cd {place} " in words or os.readlink(entry / "cwd") == place:
                    pids.append(int(entry.name))
    return pids


def _command(pid: int) -> str:
    """The command line of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _ended(pid: int, wait_s: float) -> bool:
    """Whether a process has ended, after at most this time; an unknown one counts after all of it."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, ValueError):
        time.sleep(wait_s)  # the process that holds the lock is not known yet: there is no event to wait for
        return True
    try:
        return bool(select.select([handle], [], [], wait_s)[0])
    finally:
        os.close(handle)


def main(words: list[str]) -> int:
    """The command of a host."""
    folder = Path.cwd()
    os.umask(0o077)
    try:
        match words:
            case ["start", files]:
                say(start(folder, files, sys.stdin.buffer.read()))
            case ["keep", files]:
                return keep(folder, files)
            case ["stop"]:
                stop(folder)
            case ["status"]:
                say(msgspec.json.encode(read_state(folder)).decode())
            case _:
                complain("expected start, stop or status")
                return 2
    except RunError as error:
        complain(str(error))
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
