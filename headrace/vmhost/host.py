"""A node's sandboxes: acquire one, call it, release it. The environment actor is a thin wire around this.

A sandbox is a slot of a machine of the pool (see pool). It is known by the attempt that asked for it, so that whoever
asks again gets the same one; when its machine goes, it is lost, and says so.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, NoRoom, Op, OpResult, Role, SandboxLost
from headrace.vmhost import placing
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.machine import Backend, Machine, OnEvent
from headrace.vmhost.pool import Cell, Pool
from headrace.vmhost.sandbox import Key
from headrace.vmhost.sandbox import VmSandbox as VmSandbox

if TYPE_CHECKING:
    from headrace.vmhost.clone import Clone

HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")

_log = logging.getLogger("headrace.vmhost")


def _log_event(kind: str, text: str, data: dict[str, Any]) -> None:
    _log.warning("%s: %s%s", kind, text, f" {data}" if data else "")


class Host:
    """Sandboxes of one node. Use `open`; all methods belong to one event loop."""

    def __init__(self, environment: Environment, backend: Backend, on_event: OnEvent) -> None:
        self._environment = environment
        self._backend = backend
        self._event = on_event
        self._pool = Pool(environment, backend)
        self._sandboxes: dict[str, tuple[VmSandbox, Cell]] = {}
        self._keys: dict[Key, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[Channel] = set()
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
            "vms": len(self._pool.cells),
            "sandboxes": sum(len(cell.live) for cell in self._pool.cells),
            "clones": self._pool.clones,
            "vm_cpu_ms": self._backend.cpu_ms(),
        }

    async def acquire(self, request: Acquire) -> VmSandbox:
        """The sandbox of (run, lane, role, group, slot, attempt), its files pushed: the same one when asked again.

        NoRoom when another machine would exceed the node; SandboxLost when it broke (release it, ask for another
        attempt); VmhostError when this host may not serve the lane.
        """
        known = self._keys.get(_key(request))
        if known is not None:
            sandbox, _ = self._sandboxes[known]
            await asyncio.shield(sandbox.ready)
            if not sandbox.alive:
                raise SandboxLost(f"{sandbox.id}: the sandbox of this attempt was lost")
            return sandbox
        if self._closed:
            raise NoRoom("this host is closing")
        if request.hostname and not HOSTNAME.fullmatch(request.hostname):
            raise VmhostError(f"{request.hostname!r} is no host name: letters, digits and hyphens, at most 63")
        if request.lane == "production" and self.backend == "process":
            raise VmhostError("the process backend is not isolated and may not serve the production lane")
        return await self._admit(request, self._pool.find(request) or self._pool.make(request))

    async def _admit(self, request: Acquire, cell: Cell, from_slot: int | None = None) -> VmSandbox:
        """A slot of the cell for the request; with `from_slot`, that one as its snapshot left it."""
        cell.used, cell.left = cell.used + 1, cell.left - 1
        slot = placing.choose(request, cell.unused, cell.slots) if from_slot is None else from_slot
        cell.unused.discard(slot)
        sandbox = VmSandbox(secrets.token_hex(8), _key(request), self.backend, slot)
        cell.live.add(sandbox.id)
        self._sandboxes[sandbox.id] = sandbox, cell
        self._keys[sandbox.key] = sandbox.id
        # Who asked may go away; the sandbox then waits for its lease to end.
        begun = self._spawn(self._begin(sandbox, cell, request, from_slot is None))
        await asyncio.shield(begun)
        await asyncio.shield(sandbox.ready)
        return sandbox

    async def fork(self, id: str, into: Sequence[Acquire]) -> list[VmSandbox]:
        """A sandbox for each request that goes on from where this one is, processes and all; this one goes on too.

        Each gets a machine of its own with a clock and entropy of its own. SandboxLost, NoRoom; VmhostError when the
        sandbox shares its machine, is in the middle of a call, or a request is known already.
        """
        clone, slot = self._alone(id)
        if any(_key(request) in self._keys for request in into) or len({_key(one) for one in into}) < len(into):
            raise VmhostError("a fork needs requests that nobody made before")
        taken = await clone.freeze()
        again = partial(self._backend.again, clone.template, taken)
        cells: list[Cell] = []
        try:
            for request in into:
                cells.append(self._pool.make(request, again))
        except NoRoom:
            for cell in cells:
                self._pool.end(cell)
            raise
        pairs = zip(into, cells, strict=True)
        return list(await asyncio.gather(*(self._admit(request, cell, slot) for request, cell in pairs)))

    async def checkpoint(self, id: str, whole: bool = False) -> bytes:
        """The sandbox as a blob from which `restore` goes on: what it changed (for nodes that have the very same
        template), or with `whole` all of it. SandboxLost, VmhostError.
        """
        from headrace.vmhost import snapshot

        clone, slot = self._alone(id)
        manifest = clone.template.manifest
        taken = await clone.freeze(whole)
        parts = {"template": manifest.name, "key": manifest.key, "ram_hash": manifest.ram_hash}
        checkpoint = snapshot.Checkpoint(**parts, slot=slot, whole=whole, snapshot=taken)
        return await asyncio.to_thread(snapshot.pack, checkpoint)

    async def restore(self, blob: bytes, request: Acquire) -> VmSandbox:
        """A sandbox that goes on from a checkpoint, on this node. SandboxLost, NoRoom; VmhostError when the checkpoint
        is damaged or belongs to a template that this node does not have."""
        from headrace.vmhost import snapshot

        checkpoint = await asyncio.to_thread(snapshot.unpack, blob)
        if _key(request) in self._keys:
            raise VmhostError("a restored sandbox needs a request that nobody made before")
        template = await self._backend.template(checkpoint.template)
        if template.manifest.key != checkpoint.key:
            raise VmhostError(f"the checkpoint is of another {checkpoint.template} than this node's")
        if not checkpoint.whole and template.manifest.ram_hash != checkpoint.ram_hash:
            raise VmhostError(f"this node made its {checkpoint.template} itself: it needs a whole checkpoint")
        taken = checkpoint.snapshot
        if checkpoint.whole:
            taken = await asyncio.to_thread(snapshot.rebase, taken, template.ram)
        cell = self._pool.make(request, partial(self._backend.again, template, taken))
        return await self._admit(request, cell, checkpoint.slot)

    def _alone(self, id: str) -> "tuple[Clone, int]":
        """The machine that a sandbox has for itself, and its slot there."""
        entry = self._sandboxes.get(id)
        if entry is None or not entry[0].alive:
            raise SandboxLost(f"{id}: no such sandbox here")
        sandbox, cell = entry
        if cell.machine is None or self.backend == "process":
            raise VmhostError("the process backend can't stop a sandbox: use backend = qemu")
        if len(cell.live) > 1 or cell.used > 1:
            raise VmhostError("the sandbox shares its machine with others: acquire it with isolation = episode")
        if sandbox.reaches_out:
            raise VmhostError("a sandbox with a way out can't be forked or checkpointed: acquire it without network")
        if sandbox.busy:
            raise VmhostError("a call is under way in the sandbox: wait for its answer")
        cell.left, cell.closing = 0, True
        from headrace.vmhost.clone import Clone

        assert isinstance(cell.machine, Clone)
        return cell.machine, sandbox.slot

    def get(self, id: str) -> VmSandbox | None:
        """A sandbox by its id."""
        entry = self._sandboxes.get(id)
        return entry[0] if entry else None

    def machine(self, id: str) -> Machine | None:
        """The machine that a sandbox is in."""
        entry = self._sandboxes.get(id)
        return entry[1].machine if entry else None

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
        self._pool.settle(cell)
        sandbox.end("it was released", None if cell.dead else cell.machine)

    def release_group(self, run: str, lane: str, role: Role, group: str) -> None:
        """No further slot of the group will be asked for: its machines end with their last sandboxes."""
        self._pool.release_group(run, lane, role, group)

    async def settle(self) -> None:
        """Wait until every machine that was ended is really gone, so that `usage` is exact."""
        await self._backend.settle()

    async def close(self) -> None:
        """End everything: no sandbox, no machine, no process stays."""
        self._closed = True
        for id in list(self._sandboxes):
            self.release(id)
        await self._pool.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._channels:
            await asyncio.wait([channel.ended for channel in self._channels])
        await self._backend.close()

    async def _begin(self, sandbox: VmSandbox, cell: Cell, request: Acquire, push: bool) -> None:
        """Bring the sandbox to life; its `ready` says how that went."""
        assert cell.making is not None
        try:
            machine = await asyncio.shield(cell.making)
            if cell.machine is None:
                cell.machine = machine
                machine.lost.add_done_callback(lambda lost: self._lost(cell, lost.result()))
            channel = await machine.open(sandbox.slot)
            self._channels.add(channel)
            channel.ended.add_done_callback(lambda ended: self._channels.discard(channel))
            sandbox.adopt(channel, machine)
            begun = (sandbox.begin(request, self._event),) if push else ()
            await asyncio.gather(machine.ready(), *begun)
            if request.hostname:
                await machine.name(sandbox.slot, request.hostname)
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
                self._pool.end(cell)

    def _lost(self, cell: Cell, reason: str) -> None:
        """The machine is gone: everything that hung on it is lost, and says so."""
        if cell.dead:
            return
        self._event("vm_lost", reason, {"group": cell.owner[3], "role": cell.role, "sandboxes": len(cell.live)})
        for id in list(cell.live):
            self._sandboxes[id][0].end(f"its machine is gone: {reason}")
        self._pool.end(cell)

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _key(request: Acquire) -> Key:
    return request.run, request.lane, request.role, request.group, request.slot, request.attempt
