"""The environment actor: serves the sandboxes of one node, by request and reply.

The environment nodes of a run share ``hr.rpc.environment.<caller>.acquire-<run>`` as a queue group: one node answers
each request, and a full node answers ``no_room``, so that the next request may reach another node. The nodes that hold
an image share ``hr.rpc.environment.<caller>.holds-<hash of its name>.acquire-<run>``, and an acquire of the image is
sent there first. Every later request goes to the node that holds the sandbox. `headrace.vmhost` decides in which
machine a sandbox runs.

The caller is a role, and the broker lets each role publish under its own name alone. A sandbox belongs to the role that
acquired it: a request of another role that names it, its key or its group is refused, whatever secret it carries.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET

from headrace.actors.environment.leases import Lease, Leases, OwnershipRefused, Unknown
from headrace.bus.broker.callers import callers
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.harnesses.programs import programs
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.sandbox import (
    ANY_RUN,
    Acquire,
    Acquired,
    ApplyChanges,
    Cancel,
    CheckIntegrity,
    Exec,
    FeedJob,
    FilesRefused,
    FollowJob,
    Fork,
    Forked,
    GroupKey,
    ListFiles,
    NoCapacity,
    Op,
    PullChanges,
    PullTar,
    PullTree,
    PushTar,
    ReadFile,
    Release,
    ReleaseGroup,
    Renew,
    ReplaceLines,
    RunTests,
    SandboxCall,
    SandboxKey,
    SandboxLost,
    SandboxReply,
    Search,
    StartEndpoint,
    StartJob,
    StopJob,
    ToolLog,
    WriteFiles,
    acquire_method,
    holders,
)
from headrace.messages.subjects import EVENT, RPC, RPC_NODE, token
from headrace.vmhost.backends import registry as backends
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox

REAP_EVERY_S = 1.0
OFFER_EVERY_S = 5.0
"""Seconds until a node is asked for an image that was stored on it."""
LOG_BATCH = 64
LOG_BACKLOG = 20_000
"""Largest number of tool-log lines that wait for the broker; the oldest are dropped and counted."""


class Environment(Actor):
    """Serves the methods of `messages.sandbox`. All machines end when it stops."""

    role: ClassVar[str] = "environment"

    async def start(self) -> None:
        """Open the host, which builds its template if it is missing, then serve requests."""
        self._leases = Leases()
        self._acquiring: WeakValueDictionary[SandboxKey, asyncio.Lock] = WeakValueDictionary()
        self._lines: deque[tuple[str, ToolLog]] = deque(maxlen=LOG_BACKLOG)
        self._lines_ready = asyncio.Event()
        self._lines_lost = 0
        self._calls = 0
        self._offered: dict[str, list[Any]] = {}
        """Subscriptions by the name of an image."""
        # Two runs of one broker may each have an environment on this node.
        shared = self.run == ANY_RUN
        self._node = token(self.bus.node) if shared else token(f"{self.bus.node}-{self.run}")
        # All nodes of a run must have the same backend plugin. Nodes for any run compare it among themselves.
        await agree(self.bus, self.run, backends.plugins_of(self.config.environment.backend))
        self.status = "opening the host (builds the template if it is missing)"
        self._host = await Host.open(
            self.config.environment,
            on_event=self._on_host_event,
            limits=self.config.sandboxes,
            harnesses=programs(self.config),
        )
        self.status = f"{self._host.backend}, ready"
        await self.event("environment_ready", f"{self._host.backend} on {self._node}", **self._host.facts())
        self.spawn(self._write_lines(), "tool log")
        self.every(REAP_EVERY_S, self._reap, "lease reaper")
        self.every(2.0, self._measure, "metrics")
        methods: dict[str, Callable[[str, Any], Awaitable[Message]]] = {
            "acquire": self._acquire,
            "call": self._call,
            "renew": self._renew,
            "release": self._release,
            "release_group": self._release_group,
            "fork": self._fork,
        }
        for method, handler in methods.items():
            for caller in callers("environment", method):
                subject = RPC_NODE.at(service="environment", caller=caller, node=self._node, method=method)
                await self.serve(subject, partial(handler, caller))
        self._method = "*" if shared else acquire_method(self._run_token)
        await self._offer()
        self.every(OFFER_EVERY_S, self._offer, "images")
        for caller in callers("environment", "acquire"):
            subject = RPC.where(service="environment", caller=caller, method=self._method)
            await self.serve(subject, partial(self._acquire, caller), queue="environment")

    async def _offer(self) -> None:
        """Answer acquires of the images that this node holds now, and of no others."""
        names = await asyncio.to_thread(self._host.held)
        for name in self._offered.keys() - names:
            for subscription in self._offered.pop(name):
                await self.unserve(subscription)
        for name in names - self._offered.keys():
            offered = self._offered[name] = list[Any]()
            for caller in callers("environment", "acquire"):
                subject = RPC_NODE.where(service="environment", caller=caller, node=holders(name), method=self._method)
                acquire = partial(self._acquire, caller)
                offered.append(await self.serve(subject, acquire, queue="environment"))

    async def stop(self) -> None:
        """End every machine; a later call to one of its sandboxes gets the answer ``lost``."""
        await self._host.close()
        await self._flush_lines()

    def _on_host_event(self, kind: str, text: str, data: dict[str, Any]) -> None:
        self.spawn(self.event(kind, text, "warning", **data), "host event")

    async def _acquire(self, caller: str, request: Acquire) -> Acquired | SandboxReply:
        """A sandbox with a new secret and epoch, or the reason for a failure. The latest caller of its role owns the
        sandbox; concurrent acquires of one key are serialised."""
        if request.role != caller:
            return SandboxReply(failure="refused", detail=_not_its_own(caller, request.role))
        async with self._acquiring.setdefault(SandboxKey.of(request), asyncio.Lock()):
            return await self._acquire_alone(request)

    async def _acquire_alone(self, request: Acquire) -> Acquired | SandboxReply:
        mounted = plugin = None
        try:
            if request.harness:
                request, mounted, plugin = await asyncio.to_thread(self._host.mount, request)
            sandbox = await self._host.acquire(request)
        except NoCapacity as error:
            return SandboxReply(failure="no_room", detail=str(error))
        except VmhostError as error:
            return SandboxReply(failure="refused", detail=str(error))
        except SandboxLost as error:
            lease = self._leases.find(SandboxKey.of(request))
            if lease is not None:
                await self._lost(lease, str(error))
            return _failure(error)
        acquired = self._hand_over(request, sandbox)
        if mounted is None or plugin is None or not isinstance(acquired, Acquired):
            return acquired
        return msgspec.structs.replace(acquired, harness=mounted, plugins=(*acquired.plugins, plugin))

    def _hand_over(self, request: Acquire, sandbox: VmSandbox) -> Acquired | SandboxReply:
        """Make the caller the owner, under a new secret and epoch."""
        lease = self._leases.find(SandboxKey.of(request))
        if lease is None or lease.sandbox is not sandbox:
            lease = Lease(request, sandbox)
            self._leases.add(lease)
        if request.handovers < lease.handovers:
            return SandboxReply(failure="superseded", detail="a later hand-over owns this request")
        lease.handovers = request.handovers
        lease.hand_over(request.lease_s)
        return Acquired(
            node=self._node,
            sandbox=sandbox.id,
            secret=lease.secret,
            epoch=lease.epoch,
            backend=self._host.backend,
            machine=sandbox.machine,
            digest=sandbox.digest or UNSET,
            capabilities=self._host.capabilities.names(),
            plugins=self._host.plugins,
        )

    async def _call(self, caller: str, call: SandboxCall) -> SandboxReply:
        """Run one operation for the current owner."""
        try:
            lease = self._leases.authorise(caller, call.sandbox, call.secret, call.epoch)
        except Unknown as error:
            return SandboxReply(failure="lost", detail=str(error))
        except OwnershipRefused as error:
            return SandboxReply(failure="refused", detail=str(error))
        lease.running += 1
        started = time.perf_counter()
        repeated = lease.sandbox.knows(call.call_id)
        try:
            result = await lease.sandbox.call(call.op, call.call_id)
        except SandboxLost as error:
            await self._lost(lease, str(error))
            return SandboxReply(failure="lost", detail=str(error))
        except ValueError as error:
            return SandboxReply(failure="bad_request", detail=str(error))
        finally:
            lease.running -= 1
            lease.renew()
        if not repeated:
            self._calls += 1
        if not repeated and not (isinstance(call.op, FollowJob | FeedJob) and call.op.raw):  # a transport, no tool
            self._log(lease, call, result.ok, 1000.0 * (time.perf_counter() - started))
        if lease.epoch != call.epoch:
            return SandboxReply(failure="refused", detail="the sandbox was handed over while the call ran")
        return SandboxReply(result=result)

    async def _renew(self, caller: str, request: Renew) -> Ack:
        """Renew a lease."""
        try:
            self._leases.authorise(caller, request.sandbox, request.secret, request.epoch).renew(request.lease_s)
        except (Unknown, OwnershipRefused) as error:
            return Ack(ok=False, detail=str(error), code=error.code)
        return Ack()

    async def _release(self, caller: str, request: Release) -> Ack:
        """Release a sandbox. A repeated request gets the same answer."""
        try:
            lease = self._leases.authorise(caller, request.sandbox, request.secret, request.epoch)
        except Unknown:
            return Ack()
        except OwnershipRefused as error:
            return Ack(ok=False, detail=str(error), code=error.code)
        if self._leases.drop(lease):
            self._host.release(lease.sandbox.id)
        return Ack()

    async def _release_group(self, caller: str, request: ReleaseGroup) -> Ack:
        """The caller acquires no further sandbox of the group: the group's machine ends with its last sandbox."""
        if request.role != caller:
            return Ack(ok=False, detail=f"refused: {_not_its_own(caller, request.role)}")
        self._host.release_group(GroupKey(request.run, request.lane, request.role, request.group))
        return Ack()

    async def _fork(self, caller: str, request: Fork) -> Forked | SandboxReply:
        """Copy a sandbox into new ones of the same run, lane and role. The reply leaves out a copy whose key has a
        later owner."""
        try:
            lease = self._leases.authorise(caller, request.sandbox, request.secret, request.epoch)
            source = SandboxKey.of(lease.request)
            if any(SandboxKey.of(copy)[:3] != source[:3] for copy in request.into):
                raise OwnershipRefused("a fork must have its sandbox's run, lane and role")
            lease.running += 1
            try:
                sandboxes = await self._host.fork(lease.sandbox.id, request.into)
            finally:
                lease.running -= 1
                lease.renew()
        except (Unknown, OwnershipRefused, NoCapacity, VmhostError, SandboxLost) as error:
            return _failure(error)
        pairs = zip(request.into, sandboxes, strict=True)
        replies = [self._hand_over(copy, sandbox) for copy, sandbox in pairs]
        return Forked(held=tuple(reply for reply in replies if isinstance(reply, Acquired)))

    async def _lost(self, lease: Lease, detail: str) -> None:
        if self._leases.drop(lease):
            request = lease.request
            self._host.release(lease.sandbox.id)
            await self.event(
                "sandbox_lost", detail, "warning", role=request.role, group=request.group, slot=request.slot
            )

    async def _reap(self) -> None:
        """End sandboxes whose leases lapsed."""
        for lease in self._leases.lapsed(time.monotonic(), REAP_EVERY_S):
            if self._leases.drop(lease):
                self._host.release(lease.sandbox.id)
                request = lease.request
                await self.event(
                    "lease_lapsed",
                    f"the lease of {lease.sandbox.id} was not renewed for {lease.lease_s:.0f} s",
                    "warning",
                    role=request.role,
                    group=request.group,
                    slot=request.slot,
                )

    async def _measure(self) -> None:
        await self.metric(leases=len(self._leases), calls=self._calls, **self._host.usage())

    def _log(self, lease: Lease, call: SandboxCall, ok: bool, wall_ms: float) -> None:
        request = lease.request
        kind, brief = describe(call.op)
        if request.role == "judge":  # names and commands of hidden tests: more roles read the log than their suite
            brief = ""
        line = ToolLog(
            node=self._node,
            sandbox=lease.sandbox.id,
            run=request.run,
            lane=request.lane,
            group=request.group,
            slot=request.slot,
            call_id=call.call_id,
            op=kind,
            brief=brief,
            ok=ok,
            wall_ms=round(wall_ms, 3),
        )
        if len(self._lines) == LOG_BACKLOG:
            self._lines_lost += 1
        self._lines.append((EVENT.at(run=request.run, actor="environment", type="tool_log"), line))
        self._lines_ready.set()

    async def _write_lines(self) -> None:
        """Publish the tool log in the background, so that no call waits for it."""
        while True:
            await self._lines_ready.wait()
            self._lines_ready.clear()
            await self._flush_lines()

    async def _flush_lines(self) -> None:
        while self._lines:
            batch = [self._lines.popleft() for _ in range(min(LOG_BATCH, len(self._lines)))]
            await asyncio.gather(*(self.bus.publish(subject, line) for subject, line in batch))
        if self._lines_lost:
            lost, self._lines_lost = self._lines_lost, 0
            await self.event("tool_log_lost", f"{lost} lines of the tool log were dropped", "error", lines=lost)


def _not_its_own(caller: str, role: str) -> str:
    return f"the role {caller} acquires sandboxes of its own role alone, not of {role!r}"


def _failure(error: Exception) -> SandboxReply:
    """The reply that reports an error."""
    kinds: dict[type[Exception], str] = {
        NoCapacity: "no_room",
        SandboxLost: "lost",
        Unknown: "lost",
        FilesRefused: "files_refused",
    }
    return SandboxReply(failure=kinds.get(type(error), "refused"), detail=str(error))


def describe(op: Op) -> tuple[str, str]:
    """An operation for the tool log: its kind, and at most 200 characters of its paths or words; never file content."""
    match op:
        case Exec():
            brief = " ".join(op.argv)
        case ReadFile() | ReplaceLines():
            brief = op.path
        case WriteFiles():
            brief = " ".join([*op.files, *(f"-{path}" for path in op.delete)])
        case ListFiles() | Search():
            brief = op.pattern
        case RunTests():
            brief = " ".join(op.plan.paths or op.plan.argv)
        case ApplyChanges():
            brief = " ".join(change.path for change in op.changes)
        case PullTree():
            brief = " ".join(op.patterns)
        case StartJob():
            brief = " ".join(op.argv)
        case FollowJob() | FeedJob() | StopJob():
            brief = str(op.job)
        case Cancel():
            brief = op.call_id
        case PushTar() | PullTar():
            brief = op.path
        case CheckIntegrity():
            brief = "thorough" if op.thorough else ""
        case PullChanges() | StartEndpoint():
            brief = ""
    return str(op.__struct_config__.tag), brief[:200]
