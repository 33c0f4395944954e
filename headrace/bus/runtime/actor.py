"""The base of every actor: typed handlers over the bus, and a life cycle that its supervisor watches.

An actor overrides `start` (recover, then consume, serve, listen, spawn) and `stop`. Anything that escapes one of its
background tasks ends the actor; the supervisor starts it again. Handlers of messages never end it: their failures are
retried, then dead letters.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, WrongSequence
from headrace.bus.nats.consumer import Consumer
from headrace.bus.nats.received import Received
from headrace.bus.nats.records import Skipped
from headrace.bus.runtime import ack_waits, logging, tracing
from headrace.bus.runtime.delivery import DeliveryHandler, Handler
from headrace.bus.runtime.utilization import Utilization
from headrace.bus.runtime.waits import Waits, What
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.operations import Ack, Event, Metric
from headrace.metrics import process as metrics

Level = Literal["info", "warning", "error"]


SKIPPED_EVENTS = 16
"""Number of unreadable records that cause an event each; after them only every doubling of the count does."""


class Actor:
    """Base of all actors."""

    role: ClassVar[str]
    """Whose credentials and permissions it has."""

    def __init__(self, config: Config, bus: Bus, run: str, id: str) -> None:
        self.config, self.bus, self.run, self.id = config, bus, run, id
        self.status = ""
        """One short line for operators, part of the heartbeat."""
        self.log: Any = logging.get(actor=self.name(), id=id, run=run)
        self.failed = asyncio.get_running_loop().create_future()
        """Holds the error that ended the actor, for its supervisor."""
        self.started = False
        """Whether `start` has returned."""
        self._utilization = Utilization()
        self._waits = Waits()
        self._consumers: list[Consumer] = []
        self._subscriptions: list[Any] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        bus.connection.on_error.append(self._on_bus_error)
        bus.on_full = self._on_full
        bus.on_skipped = self._on_skipped

    @classmethod
    def name(cls) -> str:
        """The actor's name, such as ``weight_sender``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    async def start(self) -> None:
        """Override: recover from streams, then consume, serve, listen, spawn."""

    async def drain(self) -> None:
        """Override: called when the actor is to end; nothing new arrives, and running handlers are awaited. Return
        unfinished work to its queue."""

    async def stop(self) -> None:
        """Override: give up own resources. Consumers have stopped."""

    async def consume(
        self,
        subject: s.Subject | str,
        handler: Handler,
        *,
        durable: str,
        filter: str | Sequence[str] | None = None,
        credit: int = 1,
        ack_wait: float = ack_waits.DEFAULT_S,
        max_deliver: int = 5,
        backoff: Sequence[float] = (0.2, 1.0, 5.0, 15.0),
        ack_sync: bool = False,
        start: Literal["all", "new"] | int = "all",
    ) -> Consumer:
        """Handle the messages of a stream, at least once each, `credit` at a time.

        handler: gets a Received. Returns: acknowledged. Raises Reject: a dead letter at once. Raises Retry: again after
        its delay. Raises anything else: an event, again after `backoff`. After `max_deliver` deliveries (-1: never) it
        is a dead letter. durable: name of the position in the stream, with the run in it where several runs share a
        broker. filter: one or several subjects of one stream, in that stream's order; default all of this run.
        start: where a new durable begins.
        """
        if filter is None:
            template = subject.template if isinstance(subject, s.Subject) else subject
            fields = {"run": self.run} if "{run}" in template else {}
            filter = subject.where(**fields) if isinstance(subject, s.Subject) else subject
        filters = [filter] if isinstance(filter, str) else list(filter)
        streams = {stream.name for stream in map(s.stream_of, filters) if stream is not None}
        if len(streams) != 1:
            raise BusError(f"{filters} are not subjects of one stream")
        durable = s.token(durable)
        delivery = DeliveryHandler(
            self.bus,
            handler,
            durable=durable,
            run=self.run,
            max_deliver=max_deliver,
            backoff=backoff,
            ack_sync=ack_sync,
            report=self.event,
            busy=self._utilization.working,
        )
        consumer = Consumer(
            self.bus,
            streams.pop(),
            filters,
            delivery,
            durable=durable,
            credit=credit,
            ack_wait=ack_wait,
            max_deliver=max_deliver,
            start=start,
            report=self.event,
        )
        self._consumers.append(consumer)
        return await consumer.open()

    async def serve(self, subject: str, handler: Callable[[Any], Awaitable[Message]], *, queue: str = "") -> Any:
        """Answer requests, a task each; what `unserve` takes. A handler that raises is an event and answers
        ``Ack(ok=False)``."""

        async def answer(message: Message) -> Message:
            with self._utilization.working():
                try:
                    return await handler(message)
                except Exception as error:
                    await self._report(error, f"answering {subject}")
                    return Ack(
                        ok=False,
                        detail=f"{type(error).__name__}: {error}",
                        code=error.code if isinstance(error, HeadraceError) else "",
                    )

        subscription = await self.bus.respond(subject, answer, queue=queue)
        self._subscriptions.append(subscription)
        return subscription

    async def unserve(self, subscription: Any) -> None:
        """Take no further request; those under way are answered."""
        self._subscriptions.remove(subscription)
        await self.bus.connection.unsubscribe(subscription)

    async def listen(self, filter: str, handler: Callable[[Any], Awaitable[None]]) -> None:
        """Handle core messages, at most once each, one after the other: handler(message). A failure is an event."""

        async def guarded(message: Message) -> None:
            try:
                await handler(message)
            except Exception as error:
                await self._report(error, f"handling a message on {filter}")

        self._subscriptions.append(await self.bus.listen(filter, guarded))

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A background task: an exception in it ends the actor."""
        task = asyncio.create_task(coro, name=f"{self.id}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._spawned_done)
        return task

    def every(self, seconds: float, fn: Callable[[], Awaitable[Any]], name: str) -> asyncio.Task[Any]:
        """Call `fn` again and again, `seconds` after it returned; an exception in it ends the actor."""

        async def loop() -> None:
            while True:
                await asyncio.sleep(seconds)
                await fn()

        return self.spawn(loop(), name)

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail with this error: the supervisor decides whether to restart the actor."""
        if not self.failed.done():
            self.failed.set_result(error)

    async def event(self, kind: str, text: str = "", level: Level = "info", **data: Any) -> None:
        """Report an event in the log, in the trace and on HR_EVENT. Does not raise when the broker is away."""
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in data.items()
        }
        fields = {f"data_{key}" if key in ("event", "text", "level") else key: value for key, value in plain.items()}
        getattr(self.log, level)(kind, text=text, **fields)
        tracing.here().event(kind, text=text, **plain)
        metrics.event(self.name(), kind, level)
        record = Event(actor=self.name(), id=self.id, run=self.run, kind=kind, level=level, text=text, data=plain)
        try:
            await self.bus.publish(s.EVENT.at(run=self._run_token, actor=self.role, type="event"), record)
        except BusError as error:
            self.log.error("event_lost", kind=kind, error=str(error))

    async def publish_event(self, message: Message, *, msg_id: str | None = None) -> int:
        """Publish a message that has no stream of its own: ``hr.event.<run>.<role>.<type>``; its sequence."""
        where = s.EVENT.at(run=self._run_token, actor=self.role, type=message.type_name)
        return await self.bus.publish(where, message, msg_id=msg_id)

    async def metric(self, **values: float) -> None:
        """Figures of this moment, on core NATS and for Prometheus, by the names of metrics/figures.py."""
        metrics.figures(self.name(), self.id, values)
        record = Metric(actor=self.name(), id=self.id, run=self.run, time=time.time(), values=values)
        await self.bus.emit(s.METRIC.at(actor=self.role), record)

    @contextlib.contextmanager
    def waiting(self, what: What = "", since: float | None = None) -> Iterator[None]:
        """A context around waiting for input or credit: that time does not count as busy.

        what: the reason, for a wait that stops work: a long wait is reported with it. since: as in `Waits.named`.
        """
        named = self._waits.named(what, since) if what else contextlib.nullcontext()
        with self._utilization.waiting(), named:
            yield

    async def news(self, event: asyncio.Event, what: What = "") -> None:
        """Wait for an event and clear it; the wait does not count as busy. what: as in `waiting`."""
        with self.waiting(what):
            await event.wait()
        event.clear()

    def waits_for(self) -> str:
        """The named waits of this actor at this moment, as one sentence; empty without any."""
        return self._waits.now()

    async def report_waits(self) -> None:
        """Publish an event about the waits that last (`Waits.report`). The supervisor calls this often."""
        text, seconds = self._waits.report()
        if text:
            await self.event("still_waiting", text, "warning", seconds=seconds)

    async def until_superseded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that writes under a fence. When another actor of this kind has taken over the run, the broker
        refuses the writes of this actor: the work ends with an event and the status ``superseded``."""
        try:
            await work()
        except WrongSequence as error:
            self.status = "superseded"
            await self.event("superseded", str(error), "error")

    async def recover_and_follow(
        self,
        streams: Mapping[str, Sequence[str]],
        apply: Callable[[Received[Any]], bool],
        news: asyncio.Event,
        written_here: Sequence[str] = (),
    ) -> None:
        """Apply the records of several streams so far, then follow each in the background.

        streams: the filters per stream. apply: returns whether a record may call for action; `news` is set for those
        that come later. written_here: filters on which this actor alone writes; it does not follow them.
        """
        for stream, filters in streams.items():
            last = 0
            async for received in self.bus.history(stream, *filters):
                apply(received)
                last = received.seq
            others = [filter for filter in filters if filter not in written_here]
            self.spawn(self._follow_stream(stream, others, last + 1, apply, news), f"following {stream}")

    async def _follow_stream(
        self,
        stream: str,
        filters: Sequence[str],
        start: int,
        apply: Callable[[Received[Any]], bool],
        news: asyncio.Event,
    ) -> None:
        async for received in self.bus.follow(stream, *filters, start=start):
            if apply(received):
                news.set()

    def take_utilization(self) -> float:
        """Share of the time since the last call in which the actor worked, 0 to 1."""
        share = self._utilization.take()
        metrics.busy(self.name(), share)
        return share

    @property
    def _run_token(self) -> str:
        return s.token(self.run)

    async def _report(self, error: Exception, doing: str) -> None:
        self.log.exception("handler_failed", doing=doing)
        await self.event("handler_failed", f"{doing}: {type(error).__name__}: {error}", "error")

    def _on_bus_error(self, text: str) -> None:
        self.spawn(self.event("bus_error", text, "error"), "bus error")

    def _on_skipped(self, record: Skipped) -> None:
        """An event for each of the first records that this actor passed over, then one at each doubling."""
        count = self.bus.skipped_count
        if count <= SKIPPED_EVENTS or count & (count - 1) == 0:
            text = f"{record.stream} #{record.seq} on {record.subject}: {record.reason} ({count} skipped so far)"
            report = self.event("record_skipped", text, "warning", stream=record.stream, seq=record.seq, count=count)
            self.spawn(report, "record skipped")

    def _on_full(self, text: str) -> None:
        self.log.warning("stream_full", text=text)

    async def _end_by(self, step: Awaitable[None], doing: str, seconds: float | None = None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await step
        except Exception as error:
            # After a failed start, attributes that `start` sets are missing. The failed start has its own report.
            if self.started or not isinstance(error, AttributeError):
                await self._report(error, doing)

    async def shut(self, timeout: float, stop_timeout: float = 10.0) -> None:
        """End an actor, for its supervisor: stop pulling, drain, let handlers finish for `timeout`, then `stop`."""
        await asyncio.gather(*(consumer.halt() for consumer in self._consumers), return_exceptions=True)
        for subscription in self._subscriptions:
            await self.bus.connection.unsubscribe(subscription)
        await self._end_by(self.drain(), "draining")
        await asyncio.gather(*(consumer.stop(timeout) for consumer in self._consumers), return_exceptions=True)
        await self._end_by(self.stop(), "stopping", max(timeout, stop_timeout))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        metrics.ended(self.id)
