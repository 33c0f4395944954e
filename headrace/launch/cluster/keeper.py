"""Keeps the processes of one host alive: `python -m headrace.launch.cluster.keeper start|keep|status|stop`, in the
host's folder.

`start` returns when the broker of the host answers and every process has been started. The keeper holds a lock, so a
host has one; its children end with it, also on kill -9. It restarts every process that ends, within the limits of
`headrace up`; beyond them it ends all processes and writes the cause.
"""

import asyncio
import fcntl
import os
import select
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Literal

import msgspec

from headrace.bus.broker.server import find_binary, refuse_busy_port
from headrace.bus.errors import BusError
from headrace.launch.cluster.file import Process, name_of
from headrace.launch.cluster.plan import ORDER, PAGE, Order, environment
from headrace.launch.output import complain, say
from headrace.launch.processes import DRAIN_S, first_of
from headrace.launch.runs import RunError
from headrace.launch.supervision.causes import last_words
from headrace.launch.supervision.children import Child, ChildFailed, actor_command
from headrace.launch.supervision.signals import Stopping, interruptible

LOCK, STATE, LOGS, LOG = "node.lock", "node.state.json", "logs", "keeper.log"
READY_S = 180.0
BROKER_S = 60.0
END_S = 90.0
"""Seconds for a stop: the drain, then the kernel's time to end killed processes."""
_READY_FD = "HEADRACE_READY_FD"


class Part(msgspec.Struct, kw_only=True):
    """One process as its keeper sees it."""

    name: str
    pid: int = 0
    restarts: int = 0
    cause: str = ""
    """The cause of its last restart."""


class State(msgspec.Struct, kw_only=True):
    """A host's report about its keeper and processes."""

    pid: int = 0
    state: Literal["starting", "running", "stopped", "failed", "none"] = "none"
    error: str = ""
    processes: list[Part] = []


class Keeper:
    """The processes of one host."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.folder = folder
        self.state = State(pid=os.getpid(), state="starting")
        self._order = order
        self._children = {name_of(process): self._child(process) for process in order.processes}
        if order.page is not None:
            self._children[PAGE] = self._page()
        self._causes: dict[str, str] = {}

    def _child(self, process: Process) -> Child:
        name = name_of(process)
        if process.broker:
            argv = self._broker()
        elif process.command:
            argv = list(process.command)
        else:
            argv = actor_command(
                process.actors,
                config=self.folder / "run.toml",
                run=self._order.run,
                url=self._order.url,
                credentials=str(self.folder / "credentials"),
            )
            argv += [word for entry in process.set for word in ("--set", entry)]
        return self._process(process, name, argv)

    def _page(self) -> Child:
        """The process that serves the live page."""
        argv = [sys.executable, "-m", "headrace.cli", "dashboard", "--config", str(self.folder / "run.toml")]
        argv += ["--set", f"bus.credentials={self.folder / 'credentials'}"]
        return self._process(Process(name=PAGE), PAGE, argv)

    def _process(self, process: Process, name: str, argv: list[str]) -> Child:
        env = environment(self._order, process, dict(os.environ))
        env.pop(_READY_FD, None)
        return Child(name, argv, self.folder / LOGS / f"{name}.log", env)

    def _broker(self) -> list[str]:
        host, _, port = self._order.url.partition("://")[2].rpartition(":")
        conf, store = self.folder / "nats.conf", self.folder / "store"
        return [find_binary(), "-c", str(conf), "-a", host, "-p", port, "-sd", str(store)]

    async def keep(self, stopping: Stopping, closing: AsyncExitStack) -> int:
        """Start all of them, then keep them alive until this is cancelled."""
        stopping.effect = "its processes drain"
        brokers = [name_of(process) for process in self._order.processes if process.broker]
        actors = [name_of(process) for process in self._order.processes if process.actors]
        others = [name for name in self._children if name not in (*brokers, *actors)]
        # Closed in reverse: actors drain while servers and broker still answer.
        for names in (brokers, others, actors):
            closing.push_async_callback(self._stop, names, stopping)
            for name in names:
                await self._children[name].start()
            if names is brokers and brokers:
                await self._declare(self._children[brokers[0]])
        self._write("running")
        _ready()
        try:
            async with asyncio.TaskGroup() as group:
                for name, child in self._children.items():
                    group.create_task(self._watch_page(child) if name == PAGE else child.watch(self._restarted))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        return 0

    async def _declare(self, broker: Child) -> None:
        """Make the streams as soon as the broker answers. RunError, with the end of its log, when it does not."""
        from headrace.bus.connection import Bus
        from headrace.bus.nats import streams

        deadline = asyncio.get_running_loop().time() + BROKER_S
        while True:
            assert broker.process is not None
            if broker.process.returncode is not None:
                raise RunError(f"nats-server ended: {last_words(broker.log)}", 4)
            try:
                async with await Bus.connect(
                    self._order.url, role="admin", credentials=str(self.folder / "credentials")
                ) as bus:
                    await streams.declare(bus)
                return
            except BusError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise RunError(f"the broker does not answer at {self._order.url}: {error}", 4) from None
                await asyncio.sleep(0.1)  # a server that is being started has no event to wait for

    async def _watch_page(self, child: Child) -> None:
        """Keep the page alive; a page that cannot be kept alive ends no run."""
        try:
            await child.watch(self._restarted)
        except ChildFailed as failure:
            self._causes[PAGE] = str(failure)
            complain(f"the run goes on without its live page: {failure}")
            self._write("running")

    def _restarted(self, name: str, why: str) -> None:
        self._causes[name] = why
        complain(f"{name} died and is restarted: {why}")
        self._write("running")

    async def _stop(self, names: list[str], stopping: Stopping) -> None:
        await asyncio.gather(*(self._children[name].stop(DRAIN_S, stopping.now) for name in names))

    def _write(self, state: Literal["starting", "running", "stopped", "failed"], error: str = "") -> None:
        self.state.state, self.state.error = state, error
        self.state.processes = [
            Part(
                name=name,
                pid=child.process.pid if child.process is not None else 0,
                restarts=child.restarts,
                cause=self._causes.get(name, ""),
            )
            for name, child in self._children.items()
        ]
        write_state(self.folder, self.state)

    def ended(self, error: str = "") -> None:
        """Write how it ended."""
        self._write("failed" if error else "stopped", error)


def write_state(folder: Path, state: State) -> None:
    """Write the host's state to another file and rename it, so that a reader never sees half of it."""
    scratch = folder / f".{STATE}"
    scratch.write_bytes(msgspec.json.encode(state))
    scratch.replace(folder / STATE)


def read_state(folder: Path) -> State:
    """The host's state. A keeper that ended without writing it is reported as failed."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    if state.state in ("starting", "running") and not _held(folder):
        state.state = "failed"
        state.error = "its keeper ended without writing a cause: it was killed, or the host restarted"
    return state


def _held(folder: Path) -> bool:
    """Whether a keeper holds the lock."""
    with (folder / LOCK).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _ready() -> None:
    """Tell the process that started this one."""
    number = int(os.environ.pop(_READY_FD, "-1"))
    if number >= 0:
        os.write(number, b"1")
        os.close(number)


def _load(folder: Path) -> Order:
    try:
        return msgspec.json.decode((folder / ORDER).read_bytes(), type=Order)
    except OSError as error:
        raise RunError(f"{folder / ORDER}: {error.strerror}; `headrace launch` writes it", 2) from None
    except msgspec.DecodeError as error:
        raise RunError(f"{folder / ORDER}: {error}; install the launcher's version of headrace here", 2) from None


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


def keep(folder: Path) -> int:
    """Be the keeper, until SIGTERM."""
    import uvloop

    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keeper = Keeper(_load(folder), folder)
        write_state(folder, keeper.state)
        try:
            uvloop.run(interruptible(keeper.keep))
        except (RunError, BusError, OSError) as error:
            keeper.ended(str(error))
            complain(str(error))
            return 1
        keeper.ended()
        return 0


def start(folder: Path) -> int:
    """Start the keeper and return when every process runs."""
    if _held(folder):
        raise RunError(f"a keeper (process {read_state(folder).pid}) runs in {folder} already; stop it first", 5)
    missing = _missing(_load(folder))
    if missing:
        raise RunError(missing, 3)
    (folder / LOGS).mkdir(exist_ok=True)
    readable, writable = os.pipe()
    with (folder / LOGS / LOG).open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "headrace.launch.cluster.keeper", "keep"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(writable,),
            env=os.environ | {_READY_FD: str(writable)},
        )
    os.close(writable)
    # The pipe closes when the keeper ends, so its failure is seen at once.
    done = select.select([readable], [], [], READY_S)[0]
    if done and os.read(readable, 1):
        return 0
    if not done:
        child.kill()
        raise RunError(f"its processes did not start within {READY_S:g} s; see {folder / LOGS}", 3)
    child.wait()
    state = read_state(folder)
    raise RunError(state.error or last_words(folder / LOGS / LOG) or "its keeper ended without writing a cause", 3)


def stop(folder: Path) -> int:
    """End the keeper and its processes; nothing happens where none runs."""
    if not _held(folder):
        return 0
    pid = read_state(folder).pid
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal.pidfd_send_signal(handle, number)
                if select.select([handle], [], [], END_S)[0]:
                    return 0
        finally:
            os.close(handle)
        raise RunError(f"process {pid} does not end; see {folder / LOGS / LOG}", 3)
    return 0


def main(words: list[str]) -> int:
    """The command of a host."""
    folder = Path.cwd()
    os.umask(0o077)
    try:
        match words:
            case ["start"]:
                return start(folder)
            case ["keep"]:
                return keep(folder)
            case ["stop"]:
                return stop(folder)
            case ["status"]:
                say(msgspec.json.encode(read_state(folder)).decode())
                return 0
    except RunError as error:
        complain(str(error))
        return error.code
    complain("expected start, keep, stop or status")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
