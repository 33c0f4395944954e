"""One sandbox: a slot of a machine, with a record of what it was asked."""

import asyncio
import time
from collections import OrderedDict
from typing import Any

from headrace.messages.sandbox import Acquire, Exec, Inspect, Op, OpResult, RunTests, SandboxLost
from headrace.vmhost import wire
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.frames import Garbage
from headrace.vmhost.machine import Machine, OnEvent
from headrace.vmhost.network import Gate

Key = tuple[str, str, str, str, int, int]
RECORD = 256
"""Answers that a sandbox remembers for repeated call ids."""


class VmSandbox:
    """One slot of one machine."""

    def __init__(self, id: str, key: Key, backend: str, slot: int = 0) -> None:
        self.id = id
        self.key = key
        self.slot = slot
        self.backend = backend
        self._channel: Channel | None = None
        self._gate: Gate | None = None
        self._answers: OrderedDict[str, asyncio.Task[OpResult]] = OrderedDict()
        self._machine: Machine | None = None
        self._gone = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered."""
        return not self._gone and (self._channel is None or not self._channel.lost.done())

    async def begin(self, request: Acquire, events: OnEvent) -> None:
        """Push the repository into a slot that was just adopted, and open what it may reach."""
        result = await self._do(*wire.open_frame(request.files, request.seed), wire.SLACK_S)
        if not result.ok:
            raise SandboxLost(f"{self.id}: the repository could not be pushed: {result.error}")
        if request.network:
            assert self._channel is not None
            self._gate = Gate(self._channel, self.id, request.network, events)
            await self._gate.start()

    def adopt(self, channel: Channel, machine: Machine) -> None:
        """Take a slot of a machine."""
        self._channel, self._machine = channel, machine

    def knows(self, call_id: str) -> bool:
        """Whether a call was asked for before: it gets that one's answer, also while it runs."""
        return call_id in self._answers

    @property
    def reaches_out(self) -> bool:
        """Whether it has a way out, with connections that no copy of it could go on with."""
        return self._gate is not None

    @property
    def busy(self) -> bool:
        """Whether a call waits for its answer."""
        return self._channel is not None and self._channel.busy

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation. SandboxLost when the sandbox is gone. A repeated call_id gets the first answer."""
        if self._gone:
            raise SandboxLost(f"{self.id}: {self._gone}")
        if isinstance(op, Inspect):
            return await self._inspect(op.thorough)
        task = self._answers.get(call_id) if call_id else None
        if task is None:
            header, bodies = wire.to_frame(op)
            if call_id and isinstance(op, Exec | RunTests):
                header["call"] = call_id
            task = asyncio.get_running_loop().create_task(self._do(header, bodies, wire.deadline_s(op)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            if call_id:
                self._answers[call_id] = task
                if len(self._answers) > RECORD:
                    self._answers.popitem(last=False)
        # A caller that gives up must not take the answer from one who asks again.
        return await asyncio.shield(task)

    async def _inspect(self, thorough: bool) -> OpResult:
        assert self._machine is not None
        started = time.perf_counter()
        try:
            touched = await self._machine.inspect(thorough)
        except VmhostError as error:
            return OpResult(ok=False, error=str(error))
        return OpResult(touched=touched, wall_ms=(time.perf_counter() - started) * 1000)

    async def _do(self, header: dict[str, Any], bodies: list[bytes], timeout: float) -> OpResult:
        assert self._channel is not None and self._machine is not None
        if sum(map(len, bodies)) > self._machine.limit_bytes:
            return OpResult(ok=False, error=f"No space left: a workspace holds {self._machine.limit_bytes >> 20} MiB")
        started = time.perf_counter()
        answer, parts = await self._channel.call(header, bodies, timeout)
        try:
            return wire.to_result(answer, parts, (time.perf_counter() - started) * 1000)
        except Garbage as garbage:
            self._channel.close(f"it broke the protocol: {garbage}")
            raise SandboxLost(f"{self.id}: {self._channel.lost.result()}") from None

    def end(self, reason: str, machine: Machine | None = None) -> None:
        """Refuse calls from now on. The slot's channel closes, or stays with a machine that will live on."""
        self._gone = self._gone or reason
        if self._channel is None:
            return
        if machine is None or self._channel.busy:
            self._channel.close(reason)
        else:
            machine.leave(self._channel)
