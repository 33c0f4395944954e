"""A durable pull consumer that never holds more messages than it has free handlers.

The idea: at most `credit` handlers run at once, and the consumer never requests more messages than it has free
handlers. It renews its request when half of the handlers are free, or all of them wait. Pull requests overlap, so the
broker always has one. Deliveries and expired requests keep the count of requested messages exact; a missing heartbeat,
a reconnect or a deleted consumer resets the count and requests again. While a handler runs, its acknowledgement wait is
restarted three times as often as needed. `DeliveryHandler` settles a delivery.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
from nats.aio.msg import Msg

from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, BusError
from headrace.bus.nats.connection import TRANSIENT
from headrace.bus.nats.received import Received, parse_reply
from headrace.bus.runtime import logging
from headrace.bus.runtime.delivery import DeliveryHandler, Report, silent

HEARTBEAT_S = 5.0
EXPIRES_S = 60.0
MAX_WAITING = 65_536
"""Pull requests that may wait at a durable: one for each idle actor. The broker refuses a further one, and its actor
repeats it ten times a second."""
_SECOND = 1_000_000_000
_TAKEN = "taken"
"""Last token of the inbox to which the broker refuses the request that follows all others."""


class Consumer:
    """Made by `Actor.consume`. All methods belong to the event loop's thread."""

    def __init__(
        self,
        bus: Bus,
        stream: str,
        filters: Sequence[str],
        delivery: DeliveryHandler,
        *,
        durable: str,
        credit: int = 1,
        ack_wait: float = 30.0,
        max_deliver: int = 5,
        start: str | int = "all",
        report: Report = silent,
    ) -> None:
        self.bus, self.stream, self.filters, self.durable = bus, stream, tuple(filters), durable
        self.credit, self.ack_wait, self.max_deliver, self.start_at = credit, ack_wait, max_deliver, start
        self._delivery, self._report = delivery, report
        self._asked = 0
        self._running: dict[asyncio.Task[None], Received[Any]] = {}
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._withdrawn = asyncio.Event()
        self._withdrawn.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = self._stopping = False
        self._inbox = ""
        self._subscription: Any = None
        self._numbers = itertools.count()
        self._heard = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def in_flight(self) -> int:
        """Messages that are being handled now."""
        return len(self._running)

    @property
    def paused(self) -> bool:
        """Whether it takes no new messages."""
        return self._paused

    def pause(self) -> None:
        """Take no new messages; what is in flight goes on. A delivery that is under way is still handled."""
        self._paused = True
        self._wake.set()

    async def withdrawn(self) -> None:
        """Return when a paused consumer has no pull request at the broker: no further message arrives."""
        await self._withdrawn.wait()

    def resume(self) -> None:
        """Take messages again."""
        self._paused = False
        self._wake.set()

    async def open(self) -> "Consumer":
        """Make or update the durable consumer, then pull. BusError when the broker refuses it."""
        await self._declare()
        self.bus.connection.on_reconnect.append(self._reconnected)
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._stay_alive())]
        self._wake.set()
        return self

    async def stop(self, timeout: float = 10.0) -> None:
        """Stop pulling, let handlers finish for `timeout` seconds, give the rest back to the broker."""
        await self.halt()
        with anyio.move_on_after(timeout):
            await self._idle.wait()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def halt(self) -> None:
        """Stop pulling for good; what is in flight goes on."""
        if self._stopping:
            return
        self._stopping = True
        if self._reconnected in self.bus.connection.on_reconnect:
            self.bus.connection.on_reconnect.remove(self._reconnected)
        if self._tasks:
            self._tasks[0].cancel()
            await asyncio.gather(self._tasks[0], return_exceptions=True)
        await self._close_session()

    async def _declare(self) -> None:
        config: dict[str, Any] = {
            "durable_name": self.durable,
            "name": self.durable,
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait * _SECOND),
            "max_deliver": self.max_deliver,
            "max_ack_pending": 10_000,
            "max_waiting": MAX_WAITING,
            "replay_policy": "instant",
            "deliver_policy": "all",
        }
        if isinstance(self.start_at, int):
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, self.start_at)}
        elif self.start_at == "new":
            config["deliver_policy"] = "new"
        tail = ""
        if len(self.filters) == 1:
            config["filter_subject"], tail = self.filters[0], f".{self.filters[0]}"
        else:
            config["filter_subjects"] = list(self.filters)
        name = f"CONSUMER.CREATE.{self.stream}.{self.durable}{tail}"
        request = {"stream_name": self.stream, "config": config}
        try:
            await self._api(name, request)
        except ApiError as error:
            if not await self._keep_position(config, name):
                raise BusError(f"consumer {self.durable} on {self.stream} is refused: {error}") from error

    async def _api(self, name: str, request: object = None) -> bytes:
        return await self.bus.connection.patiently(lambda: self.bus.connection.api(name, request))

    async def _keep_position(self, config: dict[str, Any], name: str) -> bool:
        """A durable that exists keeps the start and the limit of waiting requests with which it was made, which the
        broker never changes: only the rest of its settings is updated."""
        try:
            info = msgspec.json.decode(await self._api(f"CONSUMER.INFO.{self.stream}.{self.durable}"))
            fixed = ("deliver_policy", "opt_start_seq", "max_waiting")
            same = {key: info["config"][key] for key in fixed if key in info["config"]}
            config.pop("opt_start_seq", None)
            await self._api(name, {"stream_name": self.stream, "config": config | same})
        except ApiError:
            return False
        return True

    def _reconnected(self) -> None:
        self._asked = 0
        self._heard = asyncio.get_running_loop().time()
        self._wake.set()

    async def _pump(self) -> None:
        """Keep as many messages requested from the broker as there are free handlers."""
        loop = asyncio.get_running_loop()
        pause = 0.05
        while True:
            with anyio.move_on_after(HEARTBEAT_S) as waited:
                await self._wake.wait()
            if waited.cancelled_caught and self._asked and loop.time() - self._heard > 2 * HEARTBEAT_S:
                await self._check_request()
            self._wake.clear()
            try:
                if self._paused:
                    await self._close_session()
                    continue
                free = self.credit - len(self._running) - self._asked
                if free > 0 and (self._asked == 0 or 2 * free >= self.credit):
                    await self._ask(free)
                pause = 0.05
            except (*TRANSIENT, BusError):
                if self.bus.connection.closed.is_set():
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)
                self._wake.set()

    async def _check_request(self) -> None:
        """The heartbeats of a pull request are missing: request again, but only from a broker that answers.

        A paused broker would find every repeated request when it continues and serve all of them, beyond the credit. A
        broker that answers has lost the request, unless a heartbeat arrives now.
        """
        heard = self._heard
        try:
            await self.bus.connection.flush(HEARTBEAT_S)
            await asyncio.sleep(HEARTBEAT_S / 2)
        except (*TRANSIENT, BusError):
            return
        if self._heard == heard:
            self._asked = 0

    async def _ask(self, count: int) -> None:
        await self.bus.connection.wait_connected(5.0)
        if self._subscription is None:
            self._withdrawn.clear()
            self._inbox = self.bus.connection.inbox()
            self._subscription = await self.bus.connection.subscribe(
                f"{self._inbox}.*", self._on_message, unbounded=True
            )
            self._asked = 0
        request = {
            "batch": count,
            "expires": int(EXPIRES_S * _SECOND),
            "idle_heartbeat": int(HEARTBEAT_S * _SECOND),
        }
        self._asked += count
        self._heard = asyncio.get_running_loop().time()
        await self.bus.connection.publish_request(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.durable}",
            msgspec.json.encode(request),
            f"{self._inbox}.{next(self._numbers)}",
        )

    async def _close_session(self) -> None:
        """Withdraw the pull requests: deliveries under way still arrive, then the broker sends nothing more."""
        self._asked = 0
        if self._subscription is not None:
            await self._wait_until_pulls_are_taken()
            await self.bus.connection.unsubscribe(self._subscription)
            self._subscription = None
        self._withdrawn.set()

    async def _wait_until_pulls_are_taken(self) -> None:
        """Return when the broker has read every pull request that was sent.

        The broker looks up the inbox of a request when it takes the request from its queue. If the inbox has gone by
        then, nats-server (2.15.1) delivers to a reply subject without a listener, and the message is lost until the
        acknowledgement wait ends. The queue is in order and refuses a request that is not JSON at once: the refusal is
        the sign.
        """
        if not self.bus.connection.connected:
            return
        self._taken.clear()
        ask = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.durable}"
        try:
            await self.bus.connection.publish_request(ask, b"{", f"{self._inbox}.{_TAKEN}")
            with anyio.move_on_after(HEARTBEAT_S):
                await self._taken.wait()
        except (*TRANSIENT, BusError):
            pass  # the broker is away, or the consumer has been deleted

    async def _on_message(self, raw: Msg) -> None:
        self._heard = asyncio.get_running_loop().time()
        status = raw.headers.get("Status") if raw.headers else None
        if status is not None and not raw.reply:
            if raw.subject.endswith(f".{_TAKEN}"):
                self._taken.set()
                return
            await self._on_status(status, raw.headers or {})
            return
        self._asked = max(0, self._asked - 1)
        delivery = parse_reply(raw.reply)
        received: Received[Any] = Received(
            subject=raw.subject,
            data=raw.data,
            headers=raw.headers,
            stream=delivery.stream,
            seq=delivery.seq,
            time=delivery.time,
            deliveries=delivery.deliveries,
            consumer=delivery.consumer,
            connection=self.bus.connection,
            reply=raw.reply,
            trust=self.bus.trust,
        )
        task = asyncio.create_task(self._delivery.run(received))
        self._running[task] = received
        self._idle.clear()
        task.add_done_callback(self._done)
        if self._asked == 0:
            self._wake.set()

    def _done(self, task: asyncio.Task[None]) -> None:
        received = self._running.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            # The delivery could not be settled: the broker delivers it again after the acknowledgement wait.
            where = f"{received.subject} #{received.seq}" if received else ""
            logging.get(consumer=self.durable).error("not_settled", message=where, error=repr(task.exception()))
        if not self._running:
            self._idle.set()
        self._wake.set()

    async def _on_status(self, status: str, headers: dict[str, str]) -> None:
        if status == "100":
            return
        left = headers.get("Nats-Pending-Messages")
        words = headers.get("Description", "")
        if status == "408" and left is not None:
            self._asked = max(0, self._asked - int(left))
        else:
            self._asked = 0
            await asyncio.sleep(0.1)  # an unknown error: pause, or this would repeat the request without end
            if "deleted" in words.lower():
                if not self._stopping:
                    await self._report("consumer_lost", f"{self.durable} on {self.stream}: {words}", "warning")
                    try:
                        await self._declare()
                    except BusError as error:
                        await self._report("consumer_lost", str(error), "error")
        self._wake.set()

    async def _stay_alive(self) -> None:
        """Tell the broker that handlers still work, well within the acknowledgement wait."""
        interval = self.ack_wait / 3
        while True:
            await asyncio.sleep(interval)
            for received in list(self._running.values()):
                await received.in_progress()
