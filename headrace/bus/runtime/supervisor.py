"""Run actors in one process until they are told to end, and start again those that fail.

Supervision as in Erlang/OTP, one for one: an actor that fails is started again on a connection of its own, after a
short pause. More than `restarts` failures within `period` seconds mean that starting again does not help. So do `ALIKE`
failures in a row with one text that take longer than `period`, unless `STEADY_S` lies between two of them. An error
with an attribute `alike` is compared by that instead of its text; an empty one is like no other. Then the supervisor
gives up: it publishes an event, drains every actor of the process, and its exit code tells the parent of the
process. SIGTERM and SIGINT drain; a second signal ends at once.

The runtime's own waits are in anyio's task groups and cancel scopes; code of actors and calls of the broker are not. An
actor's task is cancelled once, and may still await then, for example to give its message back: a cancel scope would
interrupt each of these awaits. nats-py swallows cancellations, and a scope does not take the one that is raised in its
place (nats/connection.py) for its own.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio

from headrace.backoff import Intensity
from headrace.bus.broker.callers import PING, PINGING
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, CorruptPayload, Denied, StreamMissing, Unrecoverable
from headrace.bus.payloads.shared_memory import SharedMemoryStore
from headrace.bus.runtime import logging, tracing
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.errors import BROKER, FAILED, GAVE_UP_LACKING, MACHINE, WRONG_INPUT, exit_status
from headrace.messages import subjects as s
from headrace.messages.operations import Heartbeat
from headrace.metrics import process as metrics
from headrace.metrics.machine_use import machine_use

HEARTBEAT_S = 2.0
DRAIN_S = 10.0
EXIT_GAVE_UP = FAILED
EXIT_FOR_GOOD = MACHINE
"""A restart would fail in the same way; `headrace up` ends the run (launch/supervision/children.py)."""
EXIT_NO_BROKER = BROKER
GAVE_UP = {BROKER: EXIT_NO_BROKER, MACHINE: GAVE_UP_LACKING}
"""Exit status of an error to that of a process that gave up after too many of its kind; `EXIT_GAVE_UP` for others."""
ALIKE = 3
"""Failures in a row with one text that mean that a restart would fail in the same way."""
STEADY_S = 3600.0
"""A failure this long after the last one is the first of its row again."""
State = Literal["starting", "running", "draining", "stopped"]


class _Life:
    """One supervised actor: its class, its id and its state."""

    def __init__(self, cls: type[Actor], id: str) -> None:
        self.cls, self.id = cls, id
        self.state: State = "starting"
        self.actor: Actor | None = None
        self.alike: list[float] = []
        """Times of the latest failures in a row that had one text."""
        self.text = ""
        """That text."""
        self.outlook: Literal["again", "too often", "for good"] = "again"
        """The decision about the latest failure: start again, or give up because it would fail again."""

    def failed(self, error: BaseException, now: float) -> None:
        """Count a failure among those in a row that had one text. An absent broker or process begins the row anew."""
        alike: str | None = getattr(error, "alike", None)
        passes = isinstance(error, ConnectionError | TimeoutError) or (
            isinstance(error, BusError) and not isinstance(error, Denied | CorruptPayload)
        )
        text = _text(error) if alike is None else f"{type(error).__name__}: {alike}"
        if passes or alike == "":  # the broker or another process was away
            self.alike = []
        else:
            before = self.alike if self.text == text and self.alike and now - self.alike[-1] < STEADY_S else []
            self.alike = [*before, now]
        self.text = text


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Supervisor:
    """`run` returns the exit code of the process."""

    def __init__(
        self,
        config: Config,
        run: str,
        *,
        url: str,
        credentials: str | Path | None = None,
        restarts: int = 5,
        period: float = 60.0,
        drain_s: float = DRAIN_S,
        connect_s: float = 5.0,
    ) -> None:
        self.config, self.run_id, self.url, self.credentials = config, run, url, credentials
        self.drain_s, self.connect_s = drain_s, connect_s
        self.log = logging.get(actor="supervisor", run=run)
        self._stop = asyncio.Event()
        self._restarts = Intensity(restarts, period)
        self._code = 0

    def stop(self) -> None:
        """Drain everything and return from `run`."""
        self._stop.set()

    async def run(self, actors: Sequence[tuple[type[Actor], str]]) -> int:
        """Live until `stop`, a signal, or too many failures."""
        lives = [_Life(cls, id) for cls, id in actors]
        async with anyio.create_task_group() as group:
            for life in lives:
                group.start_soon(self._live, life, name=life.id)
        return self._code

    async def _live(self, life: _Life) -> None:
        """Run one actor, restarting it when it fails."""
        while not self._stop.is_set():
            error = await self._once(life)
            if error is None or self._stop.is_set():
                return
            self.log.error("actor_failed", id=life.id, error=_text(error), exc_info=error)
            if isinstance(error, StreamMissing):  # a restart does not create a stream
                self._code = EXIT_NO_BROKER
                self._stop.set()
                return
            if life.outlook != "again":
                self.log.error("gave_up", id=life.id, outlook=life.outlook)
                for_good = life.outlook == "for good"
                self._code = EXIT_FOR_GOOD if for_good else GAVE_UP.get(exit_status(error), EXIT_GAVE_UP)
                self._stop.set()
                return
            metrics.restarted(life.cls.name())
            with anyio.move_on_after(self._restarts.pause_s()):
                await self._stop.wait()

    def _count(self, life: _Life, error: BaseException) -> None:
        """Count a failure once and decide what follows.

        ``for good``: the error is of wrong input or Unrecoverable, or `ALIKE` failures with one text took longer than
        `period`. ``too often``: more than `restarts` failures within `period`. Otherwise ``again``.
        """
        now = time.monotonic()
        life.failed(error, now)
        too_often = self._restarts.exceeded()
        final = isinstance(error, Unrecoverable) or exit_status(error) == WRONG_INPUT
        if final or (len(life.alike) >= ALIKE and now - life.alike[0] > self._restarts.period_s):
            life.outlook = "for good"
        else:
            life.outlook = "too often" if too_often else "again"

    async def _once(self, life: _Life) -> BaseException | None:
        """From connecting to closing. The error that ended it, None when it was told to stop."""
        life.state = "starting"
        try:
            bus = await Bus.connect(
                self.url, role=life.cls.role, id=life.id, credentials=self.credentials, timeout=self.connect_s
            )
        except BusError as refusal:
            self._count(life, refusal)
            return refusal
        actor: Actor | None = None
        error: BaseException | None = None
        try:
            bus.use_shared_memory(SharedMemoryStore.from_config(self.config.bus, self.run_id, bus.node))
            actor = life.actor = life.cls(self.config, bus, self.run_id, life.id)
            actor.spawn(self._heartbeats(life, actor), "heartbeats")
            for caller in PINGING:
                ping = s.RPC_NODE.at(service=actor.role, caller=caller, node=actor.id, method=PING)
                await actor.serve(ping, self._ping(life, actor))
            error = await self._until_end(life, actor)
        except Exception as caught:
            error = caught
        finally:
            life.state = "draining"
            if error is not None:
                self._count(life, error)
            if error is not None and actor is not None and bus.connection.connected:
                kind = "actor_failed" if life.outlook == "again" else "actor_gave_up"
                await actor.event(kind, _text(error), "error")
            if actor is not None:
                await actor.shut(self.drain_s if error is None else min(1.0, self.drain_s), self.drain_s)
            life.state = "stopped"
            if actor is not None:
                await self._send_last_heartbeat(life, actor)
            await bus.close()
        return error

    async def _until_end(self, life: _Life, actor: Actor) -> BaseException | None:
        """Start, then wait for a failure, the loss of the connection, or the order to stop."""
        closed = actor.bus.connection.closed
        started = asyncio.ensure_future(actor.start())
        ends = (lambda: asyncio.wait({actor.failed}), closed.wait, self._stop.wait)
        try:
            await _first(lambda: asyncio.wait({started}), *ends)
            if started.done():
                started.result()
                actor.started = True
                if not actor.failed.done():
                    life.state = "running"
                    await actor.event("started", f"process {os.getpid()} on {actor.bus.node}", pid=os.getpid())
                await _first(*ends)
            if actor.failed.done():
                failure: BaseException = actor.failed.result()
                return failure
            if closed.is_set() and not self._stop.is_set():
                return BusError("the broker closed the connection for good")
            return None
        finally:
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)

    def _describe(self, life: _Life, actor: Actor, busy: float) -> Heartbeat:
        use = machine_use().take()
        return Heartbeat(
            actor=actor.name(),
            id=actor.id,
            node=actor.bus.node,
            pid=os.getpid(),
            state=life.state,
            run=self.run_id,
            status=actor.status,
            busy=round(busy, 4),
            waits=actor.waits_for(),
            cpu=use.cpu,
            gpu=use.gpu,
        )

    async def _heartbeats(self, life: _Life, actor: Actor) -> None:
        """Publish a heartbeat every `HEARTBEAT_S`, on core NATS and in HR_PRESENCE."""
        while True:
            beat = self._describe(life, actor, actor.take_utilization())
            try:
                await actor.bus.emit(s.HEARTBEAT.at(actor=actor.role, id=actor.id), beat)
                if actor.bus.connection.connected:
                    await (await actor.bus.kv("HR_PRESENCE")).put(f"{actor.role}.{actor.id}", beat)
            except BusError as error:
                self.log.warning("heartbeat_lost", id=actor.id, error=str(error))
            await actor.report_waits()
            await asyncio.sleep(HEARTBEAT_S)

    async def _send_last_heartbeat(self, life: _Life, actor: Actor) -> None:
        """Remove the actor's heartbeat while the broker is reachable."""
        if not actor.bus.connection.connected:
            return
        await actor.bus.emit(s.HEARTBEAT.at(actor=actor.role, id=actor.id), self._describe(life, actor, 0.0))
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(2.0):
                presence = await actor.bus.kv("HR_PRESENCE")
                await presence.delete(f"{actor.role}.{actor.id}")

    def _ping(self, life: _Life, actor: Actor) -> Callable[[Any], Awaitable[Heartbeat]]:
        async def answer(_: object) -> Heartbeat:
            return self._describe(life, actor, 0.0)

        return answer


async def _first(*waits: Callable[[], Awaitable[Any]]) -> None:
    """Return as soon as one of the waits returns, and cancel the others."""

    async def end(wait: Callable[[], Awaitable[Any]]) -> None:
        await wait()
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for wait in waits:
            group.start_soon(end, wait)


async def run_actors(
    classes: Sequence[type[Actor] | tuple[type[Actor], str]],
    config: Config,
    run: str,
    *,
    url: str,
    credentials: str | Path | None = None,
    restarts: int = 5,
    period: float = 60.0,
    drain_s: float = DRAIN_S,
    log_file: str | Path | None = None,
) -> int:
    """Run actors until SIGTERM or SIGINT; the exit code. A class may come with its id, else one is made.

    0: told to stop. 1: gave up after too many failures. 3: a restart would fail in the same way. 4: gave up because
    of the broker. 6: gave up because this machine lacks something.
    """
    logging.configure(log_file)
    places: list[tuple[type[Actor], str]] = []
    for entry in classes:
        cls, id = entry if isinstance(entry, tuple) else (entry, "")
        places.append((cls, s.token(id) if id else f"{cls.name()}-{os.getpid()}"))
    names = "+".join(cls.name() for cls, _ in places)
    tracing.configure(config.bus.otlp_endpoint, service_name=f"headrace-{names}", hr_run=run)
    supervisor = Supervisor(
        config, run, url=url, credentials=credentials, restarts=restarts, period=period, drain_s=drain_s
    )
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def on_signal() -> None:
        if supervisor._stop.is_set() and main is not None:
            main.cancel()
        supervisor.stop()
        # End also tasks that wait for a broker which is gone: a process without its parent does no useful work.
        loop.call_later(2 * drain_s + 5.0, os._exit, EXIT_GAVE_UP)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        return await supervisor.run(places)
    except asyncio.CancelledError:
        return 130
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        tracing.shutdown()
