"""A command's session with a run: its event loop and its connection to the run's broker."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import Config, load
from headrace.launch.output import complain
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus


class OpenRun(NamedTuple):
    """A run whose streams can be read."""

    id: str
    bus: "Bus"
    served: bool
    """Its broker was running before this command; False when the command opened the store of a finished run."""
    config: Config


def looped(body: Awaitable[int]) -> int:
    """Run a coroutine on uvloop."""
    import uvloop

    async def main() -> int:
        return await body

    return uvloop.run(main())


@asynccontextmanager
async def run_of(name: str, config_path: str = "", role: str = "operator") -> AsyncIterator[OpenRun]:
    """Open a run at its broker. config_path: a TOML with [run] id and [bus] url; without it the run's folder counts."""
    from headrace.bus.broker.credentials import of_run
    from headrace.bus.broker.server import running
    from headrace.bus.connection import Bus
    from headrace.launch import runs

    if not config_path:
        folder = runs.find(name)
        config = load(folder.config) if folder.config.is_file() else Config()
        served = bool(config.bus.url) or running(folder.broker) is not None
        async with bus_of(folder, role) as bus:
            yield OpenRun(folder.id, bus, served, config)
        return
    config = load(config_path)
    if not config.run.id or not config.bus.url:
        raise RunError(f"expected [run] id and [bus] url in {config_path}: they name the run and its broker")
    keys = of_run(config.bus.credentials, config.run.id)
    async with await Bus.connect(config.bus.url, role=role, credentials=keys or None) as bus:
        _show_skipped(bus)
        yield OpenRun(config.run.id, bus, True, config)


def _show_skipped(bus: "Bus") -> None:
    """Name each record that the bus passes over on standard error."""
    bus.on_skipped = lambda record: complain(
        f"skipped an unreadable record: {record.stream} #{record.seq} {record.subject}: {record.reason}"
    )


@asynccontextmanager
async def bus_of(folder: RunDir, role: str = "operator") -> AsyncIterator["Bus"]:
    """A connection to a run's broker: the active one, or one on loopback that serves the finished run's store.

    Records that the bus passes over because it cannot decode them are named on standard error.
    """
    from headrace.bus.broker.credentials import of_run
    from headrace.bus.broker.server import open_store, running
    from headrace.bus.connection import Bus
    from headrace.bus.payloads.shared_memory import SharedMemoryStore

    config = load(folder.config) if folder.config.is_file() else Config()
    url, credentials, server = config.bus.url, of_run(config.bus.credentials, folder.id), None
    if not url:
        credentials = str(folder.broker / "credentials")
        if not (folder.broker / "store" / "jetstream").is_dir():
            raise RunError(f"{folder.path} has no streams: no broker was ever started there")
        active = running(folder.broker)
        if active is not None:
            url = active.url
        else:
            server = await open_store(folder.broker)
            url = server.url
    try:
        async with await Bus.connect(url, role=role, credentials=credentials) as bus:
            bus.use_shared_memory(SharedMemoryStore.from_config(config.bus, folder.id, bus.node))
            _show_skipped(bus)
            yield bus
    finally:
        if server is not None:
            await server.stop()
