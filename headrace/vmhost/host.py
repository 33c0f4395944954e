"""A node's sandboxes: acquire one, call it, release it. The environment actor is a thin wire around this.

The pool keeps a machine per group (or per sandbox, with isolation ``episode``) and gives each of its slots out once.
There is never more than `max_vms`, nor more than memory holds: then `NoRoom`, and the caller asks again. A reset is a
kill and a new clone. `judge_share` of the machines are out of the rollouts' reach, so verdicts never wait for them;
`production_share` are out of training's, so a user doesn't wait for a group to end.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, NoRoom, Op, OpResult, Role, SandboxLost
from headrace.vmhost import wire
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.frames import Garbage
from headrace.vmhost.machine import Backend, Machine, OnEvent

Key = tuple[str, str, str, str, int, int]
Owner = tuple[str, str, str, str]
RECORD = 256
"""Answers that a sandbox remembers for repeated call ids."""

_log = logging.getLogger("headrace.vmhost")


def _log_event(kind: str, text: str, data: dict[str, Any]) -> None:
    _log.warning("%s: %s %s", kind, text, data)


class VmSandbox:
    """One slot of one machine."""

    def __init__(self, id: str, key: Key, backend: str) -> None:
        self.id = id
        self.key = key
        self.backend = backend
        self._channel: Channel | None = None
        self._answers: OrderedDict[str, asyncio.Task[OpResult]] = OrderedDict()
        self._limit = 0
        self._gone = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered."""
        return not self._gone and (self._channel is None or not self._channel.lost.done())

    async def begin(self, channel: Channel, limit: int, files: dict[str, bytes], seed: int) -> None:
        """Take the slot: push its repository, of at most `limit` bytes."""
        self._channel, self._limit = channel, limit
        result = await self._do(*wire.open_frame(files, seed), wire.SLACK_S)
        if not result.ok:
            raise SandboxLost(f"{self.id}: the repository could not be pushed: {result.error}")

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation. SandboxLost when the sandbox is gone. A repeated call_id gets the first answer."""
        if self._gone:
            raise SandboxLost(f"{self.id}: {self._gone}")
        task = self._answers.get(call_id) if call_id else None
        if task is None:
            header, bodies = wire.to_frame(op)
            task = asyncio.get_running_loop().create_task(self._do(header, bodies, wire.deadline_s(op)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            if call_id:
                self._answers[call_id] = task
                if len(self._answers) > RECORD:
                    self._answers.popitem(last=False)
        # A caller that gives up must not take the answer from one who asks again.
        return await asyncio.shield(task)

    async def _do(self, header: dict[str, Any], bodies: list[bytes], timeout: float) -> OpResult:
        assert self._channel is not None
        if sum(map(len, bodies)) > self._limit:
            return OpResult(ok=False, error=f"No space left: a workspace holds {self._limit >> 20} MiB")
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


class _Cell:
    """One machine in the pool, and who uses it."""

    def __init__(self, owner: Owner, shared: bool, template: str, slots: int) -> None:
        self.owner = owner
        self.shared = shared
        self.template = template
        self.left = slots
        self.closing = not shared
        self.used = 0
        self.live: set[str] = set()
        self.idle_since = 0.0
        self.making: asyncio.Task[Machine] | None = None
        self.machine: Machine | None = None
        self.dead = False

    @property
    def role(self) -> str:
        return self.owner[2]


class Host:
    """Sandboxes of one node. Use `open`; all methods belong to one event loop."""

    def __init__(self, environment: Environment, backend: Backend, on_event: OnEvent) -> None:
        self._environment = environment
        self._backend = backend
        self._event = on_event
        self._cells: set[_Cell] = set()
        self._sandboxes: dict[str, tuple[VmSandbox, _Cell]] = {}
        self._keys: dict[Key, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[Channel] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._clones = 0
        self._closed = False

    @classmethod
    async def open(cls, environment: Environment, *, on_event: OnEvent | None = None) -> "Host":
        """A host for the configured backend; builds image and template where they are missing. VmhostError."""
        report = on_event or _log_event
        backend: Backend
        if environment.backend == "process":
            from headrace.vmhost.process import ProcessBackend

            backend = ProcessBackend(environment.slots_per_vm)
        else:
            from headrace.vmhost.clones import CloneBackend

            backend = await CloneBackend.open(environment, report)
        return cls(environment, backend, report)

    @property
    def backend(self) -> str:
        """``qemu`` or ``process``."""
        return self._backend.name

    def facts(self) -> dict[str, Any]:
        """What serves here: backend, accelerator, machine, versions."""
        return self._backend.facts() | {"slots_per_vm": self._backend.slots, "max_vms": self._environment.max_vms}

    def usage(self) -> dict[str, float]:
        """Figures for metrics: machines and sandboxes alive, clones ever made, CPU-ms that machines have used."""
        return {
            "vms": len(self._cells),
            "sandboxes": sum(len(cell.live) for cell in self._cells),
            "clones": self._clones,
            "vm_cpu_ms": self._backend.cpu_ms(),
        }

    async def acquire(self, request: Acquire) -> VmSandbox:
        """The sandbox of (run, lane, role, group, slot, attempt), its files pushed: the same one when asked again.

        NoRoom when another machine would exceed the node; SandboxLost when it broke (release it, ask for another
        attempt); VmhostError when this host may not serve the lane.
        """
        key = (request.run, request.lane, request.role, request.group, request.slot, request.attempt)
        known = self._keys.get(key)
        if known is not None:
            sandbox, _ = self._sandboxes[known]
            await asyncio.shield(sandbox.ready)
            if not sandbox.alive:
                raise SandboxLost(f"{sandbox.id}: the sandbox of this attempt was lost")
            return sandbox
        if self._closed:
            raise NoRoom("this host is closing")
        if request.lane == "production" and self.backend == "process":
            raise VmhostError("the process backend is not isolated and may not serve the production lane")
        cell = self._find(request) or self._make(request)
        slot, cell.used, cell.left = cell.used, cell.used + 1, cell.left - 1
        sandbox = VmSandbox(secrets.token_hex(8), key, self.backend)
        cell.live.add(sandbox.id)
        self._sandboxes[sandbox.id] = sandbox, cell
        self._keys[key] = sandbox.id
        # Who asked may go away; the sandbox then waits for its lease to end.
        begun = self._spawn(self._begin(sandbox, cell, slot, request))
        await asyncio.shield(begun)
        await asyncio.shield(sandbox.ready)
        return sandbox

    def get(self, id: str) -> VmSandbox | None:
        """A sandbox by its id."""
        entry = self._sandboxes.get(id)
        return entry[0] if entry else None

    async def call(self, id: str, op: Op, call_id: str = "") -> OpResult:
        """`VmSandbox.call` by id. SandboxLost for an unknown one."""
        entry = self._sandboxes.get(id)
        if entry is None:
            raise SandboxLost(f"{id}: no such sandbox here")
        return await entry[0].call(op, call_id)

    def release(self, id: str) -> None:
        """Give a sandbox back. Its machine ends with its last sandbox, unless further slots may be asked for."""
        entry = self._sandboxes.pop(id, None)
        if entry is None:
            return
        sandbox, cell = entry
        self._keys.pop(sandbox.key, None)
        cell.live.discard(id)
        self._settle(cell)
        sandbox.end("it was released", None if cell.dead else cell.machine)

    def release_group(self, run: str, lane: str, role: Role, group: str) -> None:
        """No further slot of the group will be asked for: its machines end with their last sandboxes."""
        for cell in list(self._cells):
            if cell.owner == (run, lane, role, group):
                cell.closing = True
                self._settle(cell)

    async def settle(self) -> None:
        """Wait until every machine that was ended is really gone, so that `usage` is exact."""
        await self._backend.settle()

    async def close(self) -> None:
        """End everything: no sandbox, no machine, no process stays."""
        self._closed = True
        for id in list(self._sandboxes):
            self.release(id)
        for cell in list(self._cells):
            self._end(cell, "the host closes")
        for timer in self._timers:
            timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._channels:
            await asyncio.wait([channel.ended for channel in self._channels])
        await self._backend.close()

    # -- machines -------------------------------------------------------------------------------------------------

    def _find(self, request: Acquire) -> _Cell | None:
        """A machine of the same group with an unused slot."""
        if request.isolation == "episode" or request.lane == "production":
            return None
        owner = (request.run, request.lane, request.role, request.group)
        for cell in self._cells:
            if cell.owner == owner and not cell.closing and cell.left > 0 and cell.template == request.template:
                return cell
        return None

    def _make(self, request: Acquire) -> _Cell:
        """Start another machine. NoRoom."""
        while full := self._full(request):
            idle = [cell for cell in self._cells if not cell.live and cell.machine is not None]
            if not idle:
                raise NoRoom(f"no room for a {request.role} machine: {full}")
            self._end(min(idle, key=lambda cell: cell.idle_since), "its room was needed")
        shared = request.isolation == "group" and request.lane != "production"
        owner = (request.run, request.lane, request.role, request.group)
        cell = _Cell(owner, shared, request.template, self._backend.slots if shared else 1)
        cell.making = asyncio.get_running_loop().create_task(self._backend.machine(request.template))
        self._cells.add(cell)
        self._clones += 1
        return cell

    def _full(self, request: Acquire) -> str:
        """What stands in the way of another machine; empty when nothing does."""
        most = self._environment.max_vms
        if len(self._cells) >= most:
            return f"{len(self._cells)} machines of {most} are in use"
        share = most - self._environment.judge_share
        rollouts = [cell for cell in self._cells if cell.role != "judge"]
        if request.role != "judge" and len(rollouts) >= share:
            return f"{len(rollouts)} machines of {share} are in use, the rest is the judge's"
        share -= self._environment.production_share
        others = sum(cell.owner[1] != "production" for cell in rollouts)
        if request.role != "judge" and request.lane != "production" and others >= share:
            return f"{others} machines of {share} are in use, the rest is for users and the judge"
        return "" if self._backend.room(request.template, len(self._cells)) else "too little memory is free"

    async def _begin(self, sandbox: VmSandbox, cell: _Cell, slot: int, request: Acquire) -> None:
        """Bring the sandbox to life; its `ready` says how that went."""
        assert cell.making is not None
        try:
            machine = await asyncio.shield(cell.making)
            if cell.machine is None:
                cell.machine = machine
                machine.lost.add_done_callback(lambda lost: self._lost(cell, lost.result()))
            channel = await machine.open(slot)
            self._channels.add(channel)
            channel.ended.add_done_callback(lambda ended: self._channels.discard(channel))
            await sandbox.begin(channel, machine.limit_bytes, request.files, request.seed)
            sandbox.ready.set_result(None)
        except (Exception, asyncio.CancelledError) as error:
            reason = str(error) or type(error).__name__
            sandbox.end(reason)
            lost = error if isinstance(error, VmhostError) else SandboxLost(reason)
            sandbox.ready.set_exception(lost)
            sandbox.ready.exception()
            self._event("sandbox_lost", reason, {"sandbox": sandbox.id, "group": request.group})
            self.release(sandbox.id)
            if cell.machine is None:
                self._end(cell, reason)

    def _lost(self, cell: _Cell, reason: str) -> None:
        """The machine is gone: everything that hung on it is lost, and says so."""
        if cell.dead:
            return
        self._event("vm_lost", reason, {"group": cell.owner[3], "role": cell.role, "sandboxes": len(cell.live)})
        for id in list(cell.live):
            self._sandboxes[id][0].end(f"its machine is gone: {reason}")
        self._end(cell, reason)

    def _settle(self, cell: _Cell) -> None:
        """After a change: end the machine when nobody can need it, or look again when it has been idle for long."""
        if cell.dead or cell.live:
            return
        if cell.closing or cell.left == 0 or self._closed:
            self._end(cell, "released")
            return
        cell.idle_since = time.monotonic()
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            self._timers.discard(timer)
            if not cell.live and time.monotonic() - cell.idle_since >= self._environment.group_idle_s:
                self._end(cell, "idle")

        timer = loop.call_later(self._environment.group_idle_s + 0.01, look)
        self._timers.add(timer)

    def _end(self, cell: _Cell, reason: str) -> None:
        if cell.dead:
            return
        cell.dead = True
        self._cells.discard(cell)
        if cell.machine is not None:
            cell.machine.kill()
        elif cell.making is not None:
            self._spawn(self._discard(cell.making))

    async def _discard(self, making: "asyncio.Task[Machine]") -> None:
        """A machine that was still starting when its last user left."""
        with suppress(Exception):
            (await making).kill()

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
