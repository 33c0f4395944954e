"""Keeps the processes of one host alive, for `headrace launch`; cluster/host.py starts and ends it.

The keeper holds the host's lock, so a host has one; its children end with it, also on kill -9. It restarts every
process that ends, within the limits of `headrace up`; beyond them it ends all processes and writes the cause.
"""

import asyncio
import os
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import msgspec

from headrace.bus.broker.server import find_binary
from headrace.bus.errors import BusError
from headrace.launch.cluster.file import Process, name_of
from headrace.launch.cluster.plan import ORDER, PAGE, Order, environment
from headrace.launch.cluster.state import LOGS, Part, State, write_state
from headrace.launch.output import complain
from headrace.launch.processes import DRAIN_S, first_of
from headrace.launch.runs import RunError
from headrace.launch.supervision.causes import last_words
from headrace.launch.supervision.children import Child, ChildFailed, actor_command, keep_alive
from headrace.launch.supervision.signals import Stopping, interruptible
from headrace.python_modules import module_command

BROKER_S = 60.0
READY_FD = "HEADRACEREADY_FD"


class Keeper:
    """The processes of one host."""

    def __init__(self, order: Order, folder: Path, files: str) -> None:
        """files: sha256 of the files that the launcher sent."""
        self.folder = folder
        self.state = State(pid=os.getpid(), state="starting", files=files)
        self._order = order
        self._children = {name_of(process): self._child(process) for process in order.processes}
        if order.page is not None:
            self._children[PAGE] = self._page()
        self._causes: dict[str, str] = {}
        self._restarts = Counter[str]()

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
        argv = module_command("headrace.cli", "dashboard", "--config", str(self.folder / "run.toml"))
        argv += ["--set", f"bus.credentials={self.folder / 'credentials'}"]
        return self._process(Process(name=PAGE), PAGE, argv)

    def _process(self, process: Process, name: str, argv: list[str]) -> Child:
        env = environment(self._order, process, dict(os.environ))
        env.pop(READY_FD, None)
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
                try:
                    if names is brokers:
                        await self._children[name].start()
                    else:
                        await self._children[name].start_or_wait()
                except ChildFailed as failure:
                    raise first_of(failure) from None
            if names is brokers and brokers:
                await self._declare(self._children[brokers[0]])
        self._write("running")
        _ready()
        try:
            async with asyncio.TaskGroup() as group:
                for name, child in self._children.items():
                    group.create_task(self._watch_page(child) if name == PAGE else keep_alive(child, self._restarted))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        return 0

    async def _declare(self, broker: Child) -> None:
        """Make the streams as soon as the broker answers. RunError, with the end of its log, when it does not."""
        from headrace.bus.connection import Bus
        from headrace.bus.nats import streams
        from headrace.config import load as load_config

        sizes = load_config(self.folder / "run.toml").bus.stream_bytes
        deadline = asyncio.get_running_loop().time() + BROKER_S
        while True:
            assert broker.process is not None
            if broker.process.returncode is not None:
                raise RunError(f"nats-server ended: {last_words(broker.log)}", 4)
            try:
                async with await Bus.connect(
                    self._order.url, role="admin", credentials=str(self.folder / "credentials")
                ) as bus:
                    await streams.declare(bus, sizes=sizes)
                return
            except BusError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise RunError(f"the broker does not answer at {self._order.url}: {error}", 4) from None
                await asyncio.sleep(0.1)  # a server that is being started has no event to wait for

    async def _watch_page(self, child: Child) -> None:
        """Keep the page alive; a page that cannot be kept alive ends no run."""
        try:
            await keep_alive(child, self._restarted)
        except ChildFailed as failure:
            self._causes[PAGE] = str(failure)
            complain(f"the run goes on without its live page: {failure}")
            self._write("running")

    def _restarted(self, name: str, why: str) -> None:
        self._causes[name] = why
        self._restarts[name] += 1
        complain(f"{name} died and is restarted: {why}")
        self._write("running")

    async def _stop(self, names: list[str], stopping: Stopping) -> None:
        self._write("stopping")
        await asyncio.gather(*(self._children[name].stop(DRAIN_S, stopping.now) for name in names))

    def _write(self, state: Literal["starting", "running", "stopping", "stopped", "failed"], error: str = "") -> None:
        self.state.state, self.state.error = state, error
        self.state.processes = [
            Part(
                name=name,
                pid=child.pid,
                restarts=self._restarts[name],
                cause=self._causes.get(name, ""),
            )
            for name, child in self._children.items()
        ]
        write_state(self.folder, self.state)

    def ended(self, error: str = "") -> None:
        """Write how it ended."""
        self._write("failed" if error else "stopped", error)


def _ready() -> None:
    """Tell the process that started this one."""
    number = int(os.environ.pop(READY_FD, "-1"))
    if number >= 0:
        os.write(number, b"1")
        os.close(number)


def load(folder: Path) -> Order:
    """The order of a host. RunError."""
    try:
        return msgspec.json.decode((folder / ORDER).read_bytes(), type=Order)
    except OSError as error:
        raise RunError(f"{folder / ORDER}: {error.strerror}; `headrace launch` writes it", 2) from None
    except msgspec.DecodeError as error:
        raise RunError(f"{folder / ORDER}: {error}; install the launcher's version of headrace here", 2) from None


def keep(folder: Path, files: str) -> int:
    """Be the keeper, until SIGTERM. The caller holds the host's lock and hands its descriptor on."""
    import uvloop

    keeper = Keeper(load(folder), folder, files)
    write_state(folder, keeper.state)
    try:
        uvloop.run(interruptible(keeper.keep))
    except (RunError, BusError, OSError) as error:
        keeper.ended(str(error))
        complain(str(error))
        return 1
    keeper.ended()
    return 0
