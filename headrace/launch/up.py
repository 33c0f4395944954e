"""`headrace up`: one run on one machine, from nothing to its report.

    configuration -> lock -> refusals -> guest image -> broker -> actors -> progress -> drain -> audit -> report

`up` starts processes and keeps them alive; the processes act on messages alone. It ends when the curriculum publishes
that the run is finished, when a process cannot be kept alive, when the disk is nearly full, or on a signal.
In each case every child has ended afterwards, and acknowledged messages are in the run's store.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.launch import runs
from headrace.launch.guests import prepare_host
from headrace.launch.output import end_progress, say, show
from headrace.launch.page import NO_PAGE, address_of, serving, websocket_of, write_place
from headrace.launch.processes import Run, first_of
from headrace.launch.product.gateway_key import key_of_run
from headrace.launch.supervision.signals import Stopping, interruptible

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.dashboard.live.server import Address
    from headrace.dashboard.watch import Watch

Beside = Callable[[Run, "Watch"], Coroutine[Any, Any, None]]
"""A coroutine that runs beside the run, such as the fault injector. `up` cancels it at the run's end; its exception
ends the run."""


async def up(config: Config) -> int:
    """Run a configuration on this machine; return the exit code of the command."""

    async def body(stopping: Stopping, closing: AsyncExitStack) -> int:
        return await through(config, stopping, closing)

    return await interruptible(body)


async def through(config: Config, stopping: Stopping, closing: AsyncExitStack, beside: Beside | None = None) -> int:
    """A run from its lock to its report."""
    started = time.time()
    root = Path(config.run.dir)
    closing.enter_context(runs.lock(root))
    refuse(config, root)
    stopping.effect = "no run had begun"
    await prepare_host(config)
    folder = runs.create(root, config.run.id or runs.new_id(config.run.seed))
    address = address_of(config)
    if address is not None:
        closing.callback(address.socket.close)
        say(f"live page: {address.url}; `headrace dashboard {folder.id}` prints its address with its key")
    run = Run(config, folder, folder.config, stopping, address.origins if address is not None else ())
    closing.push_async_callback(run.close)
    stopping.effect = f"run {folder.id} ends in order; acknowledged messages stay in {folder.path}/"
    await run.broker.start()
    await refuse_small_streams(run)
    if config.production.enabled:
        broker = run.broker
        key = await closing.enter_async_context(key_of_run(config, folder.path, broker.url, str(broker.credentials)))
        say(f"gateway: address in {folder.path}/gateway.json, key in {key} (docs/clients.md)")
    if address is None and config.dashboard.enabled:
        say(NO_PAGE)
    say(f"run {folder.id}: logs in {folder.logs}/, streams in {folder.broker}/")
    return await see_through(run, started, stopping, beside, address)


def refuse(config: Config, root: Path) -> None:
    """Refuse an unusable engine section or checkpoint, a run without a step left, a full disk, a broker without an
    account of this run, credentials without a broker and a busy port before anything is created. ConfigError, RunError,
    BusError."""
    from headrace.bus.broker import credentials
    from headrace.bus.broker.server import refuse_busy_port
    from headrace.bus.errors import BusError
    from headrace.launch.checks import model

    model.refuse(config)
    runs.refuse_finished(root, config.run.id, config.curriculum.steps)
    runs.require_disk(root, config.run.min_free_mb)
    if config.bus.url:
        credentials.of_run(config.bus.credentials, config.run.id)
    elif config.bus.credentials:
        raise BusError(credentials.unused(config.bus.credentials))
    else:
        refuse_busy_port("127.0.0.1", config.bus.port, "[bus] port")
    if config.production.enabled:
        refuse_busy_port(config.production.host, config.production.port, "[production] port")


async def refuse_small_streams(run: Run) -> None:
    """Refuse a broker that cannot hold the versions of the run before its actors start. RunError, BusError."""
    from headrace.bus.connection import Bus
    from headrace.launch.checks import versions

    configs = [run.config] if run.branch is None else [run.config, run.branch]
    async with await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials) as bus:
        await versions.refuse(bus, configs)


async def see_through(
    run: Run, started: float, stopping: Stopping, beside: Beside | None = None, address: "Address | None" = None
) -> int:
    """Start the processes, show progress until the run is finished, then audit it and write its report."""
    from headrace.bus.connection import Bus
    from headrace.dashboard.report import Moments
    from headrace.dashboard.run_metrics import RunMetrics
    from headrace.dashboard.watch import Watch
    from headrace.launch import closing
    from headrace.launch.product import users
    from headrace.launch.serve import measured
    from headrace.policy.layout import sizes

    ready = time.time()
    await run.start()
    planned = await asyncio.to_thread(sizes.record_bytes, run.config)
    async with await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials) as bus:
        watch = Watch(bus, run.folder.id, run.config, started)
        try:
            async with AsyncExitStack() as beside_run:
                beside_run.enter_context(measured(run.config, "up", run.folder.id))
                if address is not None:
                    await serve_page(run, bus, address, beside_run)
                async with asyncio.TaskGroup() as group:
                    keeper = group.create_task(run.watch())
                    meter = group.create_task(closing.meter(run, watch))
                    figures = group.create_task(RunMetrics(watch, bus, run.folder.path, planned).follow())
                    other = group.create_task(beside(run, watch)) if beside is not None else None
                    simulated_users = None
                    if run.config.production.enabled and run.config.production.simulated_requests_per_s:
                        simulated_users = group.create_task(users.simulate(run.config, run.folder.path, stopping.asked))
                    beside_run.callback(end_progress)
                    await watch.until_finished(say, show)
                    run.finished = True
                    for task in (keeper, meter, figures, other, simulated_users):
                        if task is not None:
                            task.cancel()
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        moments = Moments(started=started, ready=ready, shutdown=time.time())
        await run.stop()
        return await closing.write_report(run, bus, watch, moments)


async def serve_page(run: Run, bus: "Bus", address: "Address", stack: AsyncExitStack) -> None:
    """Serve the live page until `stack` closes, and write where it is."""
    websocket = websocket_of(run.config, run.broker.websocket)
    page = await stack.enter_async_context(
        serving(run.config, run.folder.id, bus, address, websocket, run.broker.credentials)
    )
    write_place(run.folder.path, address.url, page.access)
