"""A node's sandboxes: acquire one, call it, release it. The environment actor serves this class over the bus.

A sandbox is a slot of a pooled machine. It is identified by the attempt that it was acquired for (`SandboxKey`), so
acquiring it again returns the same one. When its machine ends, the sandbox is lost and every call says so.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import Environment, Program, Sandboxes
from headrace.harnesses import bundles
from headrace.messages.plugins import Plugin
from headrace.messages.sandbox import (
    Acquire,
    FilesRefused,
    GroupKey,
    Mounted,
    NoCapacity,
    Op,
    OpResult,
    SandboxKey,
    SandboxLost,
)
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.backend import Backend, Capabilities, Machine, OnEvent, demands
from headrace.vmhost.backends.registry import backend_class, plugins_of
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import imported
from headrace.vmhost.images.packages import FLAVOURS
from headrace.vmhost.node import capacity, slot_assignment
from headrace.vmhost.node.pool import Pool, PooledMachine
from headrace.vmhost.node.sandbox import VmSandbox as VmSandbox

HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")

_log = logging.getLogger("headrace.vmhost")


def _log_event(kind: str, text: str, data: dict[str, Any]) -> None:
    _log.warning("%s: %s%s", kind, text, f" {data}" if data else "")


class Host:
    """Sandboxes of one node. Use `open`; its methods belong to one event loop."""

    def __init__(
        self, environment: Environment, backend: Backend, on_event: OnEvent, limits: Sandboxes | None = None
    ) -> None:
        self._environment = environment
        self._limits = SandboxLimits(**msgspec.structs.asdict(limits or Sandboxes()))
        self._backend = backend
        self._plugins = plugins_of(environment.backend)
        self._event = on_event
        self._pool = Pool(environment, backend)
        self._sandboxes: dict[str, tuple[VmSandbox, PooledMachine]] = {}
        self._keys: dict[SandboxKey, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[Channel] = set()
        self._held: tuple[int, frozenset[str]] = 0, frozenset()
        """When the store was last changed, and the names of what it held then."""
        self._closed = False
        self._harnesses: dict[str, Program] = {}

    @classmethod
    async def open(
        cls,
        environment: Environment,
        *,
        on_event: OnEvent | None = None,
        limits: Sandboxes | None = None,
        harnesses: Mapping[str, Program] | None = None,
    ) -> "Host":
        """A host for the configured backend, which builds its image and templates where they are missing. limits: of
        sandboxes whose task sets none. harnesses: those that may be mounted. VmhostError."""
        report = on_event or _log_event
        backend = await backend_class(environment.backend).open(environment, report)
        host = cls(environment, backend, report, limits)
        host._harnesses = dict(harnesses or {})
        return host

    def mount(self, request: Acquire) -> tuple[Acquire, Mounted, Plugin]:
        """The request for a sandbox with its harness, where that is in it, and its identity. Blocks at a bundle's first
        use. VmhostError where there is none."""
        name = request.harness or ""
        program = self._harnesses.get(name)
        if program is None:
            names = ", ".join(self._harnesses) or "none"
            raise VmhostError(
                f"the harness {name!r} is unknown here; known are {names}: add a table [harnesses.{name}]"
            )
        cache = Path(self._environment.cache_dir).absolute()
        bundle = bundles.find(cache, program)
        if bundle is None:
            raise VmhostError(f"the harness {name} has no bundle in {cache}: run `headrace harness {name}`")
        self.demand("harness")
        template, folder = self._backend.with_harness(request.template, bundle)
        plugin = Plugin(seam="harnesses", name=name, version=program.version, source=bundle.digest)
        mounted = Mounted(folder=folder, runners=bundle.mounted(folder))
        return msgspec.structs.replace(request, template=template), mounted, plugin

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The backend, where it comes from outside of headrace."""
        return self._plugins

    @property
    def backend(self) -> str:
        """The backend's name, such as ``qemu`` or ``process``."""
        return self._backend.name

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of its sandboxes."""
        return self._backend.capabilities

    def facts(self) -> dict[str, Any]:
        """Description of the node for reports: backend, accelerator, machine type, versions."""
        return self._backend.facts() | {"slots_per_vm": self._backend.slots, "max_vms": self._environment.max_vms}

    def usage(self) -> dict[str, float]:
        """Figures for metrics: live machines and sandboxes, clones ever made, CPU-ms that machines have used."""
        return {
            "vms": len(self._pool.machines),
            "sandboxes": sum(len(pooled.live) for pooled in self._pool.machines),
            "clones": self._pool.clones,
            "vm_cpu_ms": self._backend.cpu_ms(),
            **self._pool.spent(),
        }

    def held(self) -> frozenset[str]:
        """Names by which tasks may ask this node for an image that is stored on it. Reads the
        store where it changed since the last call."""
        cache = Path(self._environment.cache_dir).absolute()
        if not self.capabilities.upper_diff or not cache.is_dir():
            return frozenset()
        changed = cache.stat().st_mtime_ns
        if changed != self._held[0]:
            self._held = changed, frozenset(imported.references(cache))
        return self._held[1]

    async def acquire(self, request: Acquire) -> VmSandbox:
        """The sandbox of the request's key, with its files pushed; the same one when acquired again.

        NoCapacity when the node cannot hold another machine; SandboxLost when it failed (release it and acquire
        another attempt); VmhostError when this node cannot serve the request at all.
        """
        id = self._keys.get(SandboxKey.of(request))
        if id is not None:
            sandbox, _ = self._sandboxes[id]
            await asyncio.shield(sandbox.ready)
            if not sandbox.alive:
                raise SandboxLost(f"{sandbox.id}: the sandbox of this attempt was lost")
            return sandbox
        request = msgspec.structs.replace(request, limits=request.limits.over(self._limits).of_machine())
        self._check(request)
        return await self._admit(request, self._pool.find(request) or self._pool.make(request))

    def _check(self, request: Acquire) -> None:
        """NoCapacity when the host is closing; VmhostError when the request demands what the backend lacks."""
        if self._closed:
            raise NoCapacity("this host is closing")
        if request.hostname and not HOSTNAME.fullmatch(request.hostname):
            raise VmhostError(
                f"expected a host name of at most 63 letters, digits and hyphens, got {request.hostname!r}"
            )
        if request.workdir and request.template in FLAVOURS:
            raise VmhostError(f"{request.template} has one workspace: workdir {request.workdir!r} is for images")
        self.demand(*demands(request))
        needs, whole = request.limits.memory_mib + capacity.OVERHEAD_MB, capacity.whole_mb()
        if request.limits.memory_mib and needs > whole:
            raise VmhostError(f"the task's sandbox needs {needs} MiB of memory, and this node has {whole:.0f}")

        files = sum(map(len, request.files.values()))
        if request.limits.disk_mib and files > request.limits.disk_mib << 20:
            limit = request.limits.disk_mib
            raise VmhostError(f"the task's repository has {files} bytes, and its disk_mib is {limit}: raise disk_mib")

    def demand(self, *names: str) -> None:
        """VmhostError, naming what is missing, unless the backend has all of these capabilities."""
        if missing := self.capabilities.missing(names):
            raise VmhostError(
                f"the {self.backend} backend lacks the capability {', '.join(missing)}; "
                "use a backend that has it, such as qemu"
            )

    async def _admit(self, request: Acquire, pooled: PooledMachine, from_slot: int | None = None) -> VmSandbox:
        """Give the request a slot of the machine; with `from_slot`, that slot as its snapshot left it."""
        pooled.used, pooled.left = pooled.used + 1, pooled.left - 1
        slot = slot_assignment.choose(request, pooled.unused, pooled.slots) if from_slot is None else from_slot
        pooled.unused.discard(slot)
        sandbox = VmSandbox(secrets.token_hex(8), SandboxKey.of(request), self.backend, slot, request.workdir)
        sandbox.plugins, sandbox.events = self._plugins, self._event
        sandbox.neighbours = lambda: len(pooled.live - {sandbox.id})
        pooled.live.add(sandbox.id)
        self._sandboxes[sandbox.id] = sandbox, pooled
        self._keys[sandbox.key] = sandbox.id
        # The caller may be cancelled; the sandbox then waits for its lease to lapse.
        starting = self._spawn(self._start(sandbox, pooled, request, from_slot is None))
        await asyncio.shield(starting)
        await asyncio.shield(sandbox.ready)
        return sandbox

    async def fork(self, id: str, into: Sequence[Acquire]) -> list[VmSandbox]:
        """One sandbox per request that continues from where this one is, processes included; this one continues too.

        Each gets a machine of its own with its own clock and entropy. SandboxLost, NoCapacity; VmhostError when the
        backend cannot fork, the sandbox shares its machine, a call is running in it, or a request's key is in use.
        """
        self.demand("fork")
        keys = {SandboxKey.of(request) for request in into}
        if len(keys) < len(into) or keys & self._keys.keys():
            raise VmhostError("fork request keys must be new and unique")
        machine, slot = self._exclusive(id)
        make = await self._backend.fork(machine)
        copies: list[PooledMachine] = []
        try:
            for request in into:
                copies.append(self._pool.make(request, make))
        except NoCapacity:
            for pooled in copies:
                self._pool.end(pooled)
            raise
        pairs = zip(into, copies, strict=True)
        return list(await asyncio.gather(*(self._admit(request, pooled, slot) for request, pooled in pairs)))

    def _exclusive(self, id: str) -> tuple[Machine, int]:
        """The machine that a sandbox has for itself, and its slot. The machine ends with this sandbox from now on."""
        entry = self._sandboxes.get(id)
        if entry is None or not entry[0].alive or entry[0].own_end or entry[1].machine is None:
            raise SandboxLost(f"{id}: this node has no such sandbox")
        sandbox, pooled = entry
        if len(pooled.live) > 1 or pooled.used > 1:
            raise VmhostError("the sandbox shares its machine with others: acquire it with isolation = episode")
        if sandbox.has_network:
            raise VmhostError("a sandbox with network access cannot be copied: acquire it without network")
        if sandbox.busy:
            raise VmhostError("a call is running in the sandbox: wait for its answer")
        assert pooled.machine is not None
        pooled.left, pooled.closing = 0, True
        return pooled.machine, sandbox.slot

    def get(self, id: str) -> VmSandbox | None:
        """A sandbox by its id."""
        entry = self._sandboxes.get(id)
        return entry[0] if entry else None

    def machine(self, id: str) -> Machine | None:
        """The machine of a sandbox."""
        entry = self._sandboxes.get(id)
        return entry[1].machine if entry else None

    async def call(self, id: str, op: Op, call_id: str = "") -> OpResult:
        """`VmSandbox.call` by id. SandboxLost for an unknown one."""
        entry = self._sandboxes.get(id)
        if entry is None:
            raise SandboxLost(f"{id}: this node has no such sandbox")
        return await entry[0].call(op, call_id)

    def release(self, id: str) -> None:
        """Give a sandbox back. Its machine ends with its last sandbox, unless further sandboxes may join it."""
        entry = self._sandboxes.pop(id, None)
        if entry is None:
            return
        sandbox, pooled = entry
        self._keys.pop(sandbox.key, None)
        pooled.live.discard(id)
        self._pool.update(pooled)
        sandbox.end("it was released", None if pooled.dead else pooled.machine)

    def release_group(self, group: GroupKey) -> None:
        """Expect no further sandbox of the group: its machines end with their last sandboxes."""
        self._pool.release_group(group)

    async def settle(self) -> None:
        """Wait until every machine that was ended is gone, so that `usage` is exact."""
        await self._backend.settle()

    async def close(self) -> None:
        """End every sandbox, machine and process."""
        self._closed = True
        for id in list(self._sandboxes):
            self.release(id)
        await self._pool.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._channels:
            await asyncio.wait([channel.ended for channel in self._channels])
        await self._backend.close()

    async def _start(self, sandbox: VmSandbox, pooled: PooledMachine, request: Acquire, push: bool) -> None:
        """Start the sandbox; its `ready` holds the outcome. push: whether its files are still to be written."""
        assert pooled.making is not None
        try:
            machine = await asyncio.shield(pooled.making)
            if pooled.machine is None:
                pooled.machine = machine
                machine.lost.add_done_callback(lambda lost: self._lost(pooled, lost.result()))
            channel = await machine.open(sandbox.slot)
            self._channels.add(channel)
            channel.ended.add_done_callback(lambda ended: self._channels.discard(channel))
            sandbox.adopt(channel, machine)
            pushes = (sandbox.begin(request, self._event, self._environment.private_places),) if push else ()
            await asyncio.gather(machine.ready(), *pushes)
            if request.hostname:
                await machine.name(sandbox.slot, request.hostname)
            sandbox.ready.set_result(None)
        except (Exception, asyncio.CancelledError) as error:
            reason = str(error) or type(error).__name__
            sandbox.end(reason)
            lost = error if isinstance(error, VmhostError | FilesRefused) else SandboxLost(reason)
            sandbox.ready.set_exception(lost)
            sandbox.ready.exception()
            self._event("sandbox_lost", reason, {"sandbox": sandbox.id, "group": request.group})
            self.release(sandbox.id)
            if pooled.machine is None:
                self._pool.end(pooled)

    def _lost(self, pooled: PooledMachine, reason: str) -> None:
        """The machine has ended: every sandbox in it is lost."""
        if pooled.dead:
            return
        group = pooled.group
        self._event("vm_lost", reason, {"group": group.group, "role": group.role, "sandboxes": len(pooled.live)})
        for id in list(pooled.live):
            self._sandboxes[id][0].machine_ended(f"its machine has ended: {reason}", len(pooled.live) == 1)
        self._pool.end(pooled)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
