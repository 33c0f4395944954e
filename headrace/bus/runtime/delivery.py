"""Run a handler on one delivery, and settle the delivery by the handler's outcome.

A handler that returns is acknowledged. Reject, an unknown type and the last failure end the message with a reason that
the broker tells the dead_letter actor. Retry and any other failure bring it back later. The schedule of repeats is ours
(a delayed nak) and not the broker's `backoff`, which would replace the acknowledgement wait.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, Reject, Retry
from headrace.bus.nats.received import Received
from headrace.bus.nats.records import UNREADABLE
from headrace.bus.runtime import logging, tracing
from headrace.messages import subjects as s
from headrace.messages.operations import Rejected
from headrace.metrics import process as metrics

Handler = Callable[[Received[Any]], Awaitable[None]]


class Report(Protocol):
    """The method by which a consumer reports failures: `Actor.event`."""

    async def __call__(self, kind: str, text: str = "", level: Any = "info", **data: Any) -> None:
        """One event: kind, text, level and figures."""


async def silent(kind: str, text: str = "", level: Any = "info", **data: Any) -> None:
    """A report that discards its events."""


class DeliveryHandler:
    """One consumer's handler with its rules."""

    def __init__(
        self,
        bus: Bus,
        handler: Handler,
        *,
        durable: str,
        run: str = "",
        max_deliver: int = 5,
        backoff: Sequence[float] = (0.2, 1.0, 5.0, 15.0),
        ack_sync: bool = False,
        report: Report = silent,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.bus, self.durable, self.run_id = bus, durable, s.token(run)
        self.max_deliver, self.backoff, self.ack_sync = max_deliver, tuple(backoff) or (1.0,), ack_sync
        self._handler, self._report, self._utilization = handler, report, busy
        self._log = logging.get(consumer=durable)

    async def run(self, received: Received[Any]) -> None:
        """Handle and settle. Raises only when settling failed, or CancelledError after the delivery was returned."""
        started, outcome = time.perf_counter(), "handed_back"
        with (
            self._utilization(),
            tracing.processing(received.subject, received.headers, self.durable, received.deliveries) as span,
        ):
            try:
                await self.bus.claim(received)
                _ = received.message
                await self._handler(received)
                await (received.ack_sync() if self.ack_sync else received.ack())
                outcome = "handled"
            except Reject as error:
                span.fail(error)
                outcome = "rejected"
                await self._give_up(received, error.reason)
            except Retry as error:
                outcome = "retried"
                if not await self._used_up(received, error.reason):
                    self._log.info("retry", subject=received.subject, seq=received.seq, reason=error.reason)
                    await received.nak(error.delay)
            except asyncio.CancelledError:
                await received.nak()
                raise
            except UNREADABLE as error:
                span.fail(error)
                outcome = "failed"
                if error is received.error:
                    await self._give_up(received, str(error))
                else:
                    await self._failed(received, error)
            except Exception as error:
                span.fail(error)
                outcome = "failed"
                await self._failed(received, error)
            finally:
                metrics.delivered(received.stream, outcome, time.perf_counter() - started)

    async def _failed(self, received: Received[Any], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if not await self._used_up(received, reason):
            delay = self.backoff[min(received.deliveries, len(self.backoff)) - 1]
            await self._tell("retry", received, reason, "warning", delay=delay)
            await received.nak(delay)

    async def _used_up(self, received: Received[Any], reason: str) -> bool:
        """Give up a message after its last delivery."""
        last = 0 < self.max_deliver <= received.deliveries
        if last:
            await self._give_up(received, f"given up after {received.deliveries} deliveries: {reason}")
        return last

    async def _give_up(self, received: Received[Any], reason: str) -> None:
        """End a message for good. A work queue forgets it at once, so a copy goes to the dead_letter actor first."""
        await self._tell("rejected", received, reason, "error")
        stream = s.STREAM.get(received.stream)
        if stream is not None and stream.retention == "workqueue":
            copy = Rejected(
                stream=received.stream,
                consumer=received.consumer,
                stream_seq=received.seq,
                subject=received.subject,
                reason=reason,
                deliveries=received.deliveries,
                headers=dict(received.headers),
                payload=bytes(received.data),
            )
            where = s.EVENT.at(run=self.run_id, actor=self.bus.role, type=Rejected.type_name)
            await self.bus.publish(where, copy, msg_id=f"rejected-{received.stream}-{received.seq}")
        await received.term(reason)

    async def _tell(self, kind: str, received: Received[Any], reason: str, level: str, **data: Any) -> None:
        try:
            await self._report(
                kind,
                f"{received.subject} #{received.seq}: {reason}",
                level,
                stream=received.stream,
                seq=received.seq,
                consumer=self.durable,
                deliveries=received.deliveries,
                **data,
            )
        except BusError:
            pass  # the log has it
