"""`headrace up`: one run on one machine, from nothing to its report.

    configuration -> lock -> refusals -> guest image -> broker -> actors -> progress -> drain -> audit -> report

Nobody conducts: `up` starts processes and watches them; what they do next they learn from the bus. It ends when the
curriculum says that the run is finished, when a process can't be kept alive, when the disk is nearly full, or on a
signal; in each case every child is gone afterwards, and what was acknowledged is in the run's store.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.launch import runs
from headrace.launch.guests import prepare_host
from headrace.launch.output import say
from headrace.launch.processes import Run, first_of
from headrace.launch.signals import Stopping, interruptible

if TYPE_CHECKING:
    from headrace.dashboard.watch import Watch

Beside = Callable[[Run, "Watch"], Coroutine[Any, Any, None]]
"""What else happens to a run while it goes on; cancelled when it is over, and ends it by raising."""


async def up(config_path: str, overrides: Sequence[str]) -> int:
    """Run a configuration on this machine; the exit code of the command."""
    from headrace.config import load

    config = load(config_path, overrides)

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        return await through(config, stopping, closing)

    return await interruptible(body)


async def through(config: Config, stopping: Stopping, closing: AsyncExitStack, beside: Beside | None = None) -> int:
    """The whole life of a run."""
    started = time.time()
    root = Path(config.run.dir)
    closing.enter_context(runs.lock(root))
    refuse(config, root)
    stopping.what = "no run had begun"
    await prepare_host(config)
    folder = runs.create(root, config.run.id or runs.new_id(config.run.seed))
    run = Run(config, folder, folder.config, stopping)
    closing.push_async_callback(run.close)
    stopping.what = f"run {folder.id} ends in order; what was acknowledged stays in {folder.path}/"
    await run.broker.start()
    say(f"run {folder.id}: logs in {folder.logs}/, streams in {folder.broker}/")
    return await see_through(run, started, stopping, beside)


def refuse(config: Config, root: Path) -> None:
    """What can be told before anything is made: a full disk, a busy port. RunError, BusError."""
    from headrace.bus.server import refuse_busy_port

    runs.require_room(root, config.run.min_free_mb)
    if not config.bus.url:
        refuse_busy_port("127.0.0.1", config.bus.port, "[bus] port")
    if config.production.enabled:
        refuse_busy_port(config.production.host, config.production.port, "[production] port")


async def see_through(run: Run, started: float, stopping: Stopping, beside: Beside | None = None) -> int:
    """Start the processes, show progress until the run says it is finished, then close the books."""
    from headrace.bus.connection import Bus
    from headrace.dashboard.watch import Watch
    from headrace.launch import closing, users

    ready = time.time()
    await run.start()
    bus = await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials)
    watch = Watch(bus, run.folder.id, run.config, started)
    try:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(run.watch())
            meter = group.create_task(closing.meter(run, watch))
            other = group.create_task(beside(run, watch)) if beside is not None else None
            crowd = None
            if run.config.production.enabled and run.config.production.simulate:
                crowd = group.create_task(users.simulate(run.config, run.folder.path, stopping.asked))
            await watch.until_finished(say)
            for task in (keeper, meter, other, crowd):
                if task is not None:
                    task.cancel()
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    shutdown = time.time()
    await run.stop()
    return await closing.close_books(run, bus, watch, started=started, ready=ready, shutdown=shutdown)
