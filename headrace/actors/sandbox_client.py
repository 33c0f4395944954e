"""The asking side of the sandbox calls: `RemoteSandbox` is `messages.sandbox.Sandbox` over request and reply.

`Sandboxes` acquires them for one actor, keeps their leases alive and gives them back. Slots of one group are asked for
at the node that took the group's first one, so that they land in the group's VM.
"""

import asyncio
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.sandbox import (
    Acquire,
    Acquired,
    Exec,
    NoRoom,
    Op,
    OpResult,
    Release,
    ReleaseGroup,
    Renew,
    RunTests,
    SandboxCall,
    SandboxLost,
    SandboxReply,
)
from headrace.messages.subjects import RPC, RPC_NODE

ANSWER_S = 30.0
"""What a node may take for an answer beyond the operation's own time limit; a clone on a busy host takes seconds."""
FIRST_ASK_S = 4.0
"""When a node is asked again, and so on in doubling steps: an answer to what came over a connection that broke since is
lost, because the broker lets a node answer only on the connection that heard the question."""
SILENCE_S = 5.0
"""How long a node that does not listen may be reconnecting before its sandboxes count as lost."""
PULSE_S = 2.0
"""How often a node is asked, while a call runs there, whether it still has the sandbox: a dead one never answers."""
REMEMBER_GROUPS = 1024


class Superseded(SandboxLost):
    """Another holder acquired this sandbox after us: whatever we were doing, we are not the one who does it now."""


class NodeSilent(SandboxLost):
    """The node does not answer at all, so nothing is known about what ran there."""


class _Group(NamedTuple):
    run: str
    lane: str
    role: str
    group: str


class _Door:
    """Where the askers of one group wait for each other."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


class RemoteSandbox:
    """A sandbox on some node. SandboxLost (or one of its kinds above) when it can't be used any more."""

    def __init__(self, bus: Bus, acquired: Acquired, lease_s: float) -> None:
        self._bus = bus
        self._held = acquired
        self._lease_s = lease_s
        self.id, self.node, self.backend = acquired.sandbox, acquired.node, acquired.backend
        self.fresh = acquired.epoch == 1
        """Nobody held it before."""
        self.heard = time.monotonic()
        """When its node last counted our lease."""

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """One operation. A repeat with the same `call_id` is answered from the node's record."""
        held = self._held
        call = SandboxCall(
            sandbox=held.sandbox, secret=held.secret, epoch=held.epoch, call_id=call_id or uuid.uuid4().hex, op=op
        )
        answer = asyncio.ensure_future(_persist(self._bus, self.subject("call"), call, limit_of(op) + ANSWER_S))
        pulse = asyncio.ensure_future(self._until_dead())
        try:
            await asyncio.wait({answer, pulse}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise pulse.result()
        finally:
            answer.cancel()
            pulse.cancel()
        reply = answer.result()
        self.heard = time.monotonic()
        if isinstance(reply, SandboxReply):
            if reply.result is not None:
                return reply.result
            if reply.failure == "bad_request":
                return OpResult(ok=False, error=reply.detail or "the operation can't be done")
            if reply.failure == "refused":
                raise Superseded(f"{self.id}: {reply.detail}")
            raise SandboxLost(f"{self.id}: {reply.detail or reply.failure}")
        raise SandboxLost(f"{self.id}: {getattr(reply, 'detail', type(reply).__name__)}")

    async def _until_dead(self) -> SandboxLost:
        """Why the call that runs will not be answered, once that is known."""
        gone_since = 0.0
        while True:
            await asyncio.sleep(PULSE_S)
            try:
                kept = await self._keep(PULSE_S)  # one that dies with our question never answers it
            except NoResponders as error:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > SILENCE_S:
                    return NodeSilent(f"{self.id}: {error}")
                continue
            except (BusTimeout, Disconnected):
                continue
            gone_since = 0.0
            if kept.detail.startswith("lost"):
                # Its node started anew. (When it is another's now, the call itself is told so.)
                return SandboxLost(f"{self.id}: {kept.detail}")

    async def renew(self) -> bool:
        """Keep it; False when the node says that it is gone or another's."""
        return (await self._keep(ANSWER_S)).ok

    async def _keep(self, timeout: float) -> Ack:
        held = self._held
        request = Renew(sandbox=held.sandbox, secret=held.secret, epoch=held.epoch, lease_s=self._lease_s)
        reply = await self._bus.request(self.subject("renew"), request, timeout=timeout)
        self.heard = time.monotonic()
        return reply if isinstance(reply, Ack) else Ack(ok=False, detail=type(reply).__name__)

    async def release(self) -> None:
        """Give it back; errors are the lease's business."""
        held = self._held
        request = Release(sandbox=held.sandbox, secret=held.secret, epoch=held.epoch)
        await self._bus.request(self.subject("release"), request, timeout=ANSWER_S)

    def subject(self, method: str) -> str:
        """Where its node listens."""
        return RPC_NODE.at(service="environment", node=self.node, method=method)


class Sandboxes:
    """All sandboxes that one actor holds."""

    def __init__(
        self, bus: Bus, lease_s: float, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """waiting: entered while there is no room, so that an actor does not count that time as work."""
        self._bus = bus
        self._lease_s = lease_s
        self._waiting = waiting
        self._held: set[RemoteSandbox] = set()
        self._nodes: OrderedDict[_Group, str] = OrderedDict()
        self._doors: dict[_Group, _Door] = {}
        self._given_back = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def acquire(self, request: Acquire, *, node: str = "", patience_s: float = 600.0) -> RemoteSandbox:
        """A sandbox for the request, waiting for room. With `node`, on that node or not at all.

        NoRoom once patience ends; SandboxLost when a node tried and failed, or when `node` is silent.
        """
        group = _Group(request.run, request.lane, request.role, request.group)
        deadline = time.monotonic() + patience_s
        door = self._doors.setdefault(group, _Door())
        door.waiting += 1
        pause = 0.1
        try:
            while time.monotonic() < deadline:
                home = "" if node else self._nodes.get(group, "")
                if home:
                    # The group is open somewhere: its slots are asked for side by side.
                    sandbox = await self._ask(request, home)
                    if sandbox is not None:
                        return self._hold(sandbox)
                    self._nodes.pop(group, None)
                async with door.lock:
                    # One asker at a time opens a group or waits for room.
                    if not node and group in self._nodes:
                        continue
                    sandbox = await self._ask(request, node, insist=bool(node))
                    if sandbox is not None:
                        self._remember(group, sandbox.node)
                        return self._hold(sandbox)
                    with self._waiting():
                        try:
                            async with asyncio.timeout(pause * random.uniform(0.5, 1.5)):
                                await self._given_back.wait()
                        except TimeoutError:
                            pause = min(1.6 * pause, 2.0)
            raise NoRoom(f"no node had room for {request.group} within {patience_s:.0f} s")
        finally:
            door.waiting -= 1
            if not door.waiting:
                self._doors.pop(group, None)

    async def _ask(self, request: Acquire, node: str, insist: bool = False) -> RemoteSandbox | None:
        """Ask a node, or any. None means no room, or nobody there (yet)."""
        if node:
            subject = RPC_NODE.at(service="environment", node=node, method="acquire")
        else:
            subject = RPC.at(service="environment", method="acquire")
        try:
            if insist:
                reply = await _persist(self._bus, subject, request, ANSWER_S)
            elif node:
                reply = await _ask_again(self._bus, subject, request, ANSWER_S)
            else:  # once: another node might answer the second time, and both would make one
                reply = await self._bus.request(subject, request, timeout=ANSWER_S)
        except (NoResponders, BusTimeout, Disconnected):
            # Asking again is safe: the same key gets the same sandbox.
            return None
        if isinstance(reply, Acquired):
            return RemoteSandbox(self._bus, reply, self._lease_s)
        if isinstance(reply, SandboxReply) and reply.failure == "no_room":
            return None
        detail = getattr(reply, "detail", type(reply).__name__)
        if isinstance(reply, SandboxReply) and reply.failure == "superseded":
            raise Superseded(f"{request.group}: {detail}")
        raise SandboxLost(f"no sandbox for {request.group}: {detail}")

    def _hold(self, sandbox: RemoteSandbox) -> RemoteSandbox:
        self._held.add(sandbox)
        return sandbox

    def _remember(self, group: _Group, node: str) -> None:
        self._nodes[group] = node
        if len(self._nodes) > REMEMBER_GROUPS:
            self._nodes.popitem(last=False)

    def give_back(self, sandbox: RemoteSandbox) -> None:
        """Release in the background: nothing waits for it, and a release that gets lost ends with the lease."""
        self._held.discard(sandbox)
        task = asyncio.create_task(self._release(sandbox))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def let_go(self, sandbox: RemoteSandbox) -> None:
        """Keep its lease alive no longer, without releasing it: a successor takes it over."""
        self._held.discard(sandbox)

    async def _release(self, sandbox: RemoteSandbox) -> None:
        try:
            await sandbox.release()
        except (NoResponders, BusTimeout, Disconnected):
            return
        self._given_back.set()
        self._given_back = asyncio.Event()

    async def release_group(self, run: str, lane: str, role: str, group: str) -> None:
        """Tell the group's node that no further slot will be asked for."""
        node = self._nodes.pop(_Group(run, lane, role, group), "")
        if node:
            subject = RPC_NODE.at(service="environment", node=node, method="release_group")
            request = ReleaseGroup(run=run, lane=lane, role="judge" if role == "judge" else "rollout", group=group)
            try:
                await self._bus.request(subject, request, timeout=ANSWER_S)
            except (NoResponders, BusTimeout, Disconnected):
                return

    async def renew(self) -> None:
        """Run every third of a lease: keep what was silent for a third of it (every call renews by itself)."""
        now = time.monotonic()
        quiet = [sandbox for sandbox in self._held if now - sandbox.heard > self._lease_s / 3]
        await asyncio.gather(*(self._renew(sandbox) for sandbox in quiet))

    async def _renew(self, sandbox: RemoteSandbox) -> None:
        try:
            kept = await sandbox.renew()
        except (NoResponders, BusTimeout, Disconnected):
            return
        if not kept:
            # Its user hears of it with the next call.
            self._held.discard(sandbox)

    async def close(self) -> None:
        """Wait for the releases under way."""
        await asyncio.gather(*self._background)


async def _persist(bus: Bus, subject: str, message: Message, timeout: float) -> Message:
    """A request that survives a reconnecting node and a lost reply. NodeSilent when nobody answers for a while."""
    gone_since = 0.0
    timeouts = 0
    while True:
        try:
            return await _ask_again(bus, subject, message, timeout)
        except (NoResponders, Disconnected) as error:
            gone_since = gone_since or time.monotonic()
            if time.monotonic() - gone_since > SILENCE_S:
                raise NodeSilent(f"{subject}: {error}") from None
            await asyncio.sleep(0.2 + 0.2 * random.random())
        except BusTimeout as error:
            timeouts += 1
            if timeouts == 2:
                raise NodeSilent(f"{subject}: {error}") from None


async def _ask_again(bus: Bus, subject: str, message: Message, timeout: float) -> Message:
    """A request that one node may hear several times, as calls and acquires by their ids may. BusTimeout at last."""
    deadline = time.monotonic() + timeout
    patience = FIRST_ASK_S
    while True:
        left = deadline - time.monotonic()
        try:
            return await bus.request(subject, message, timeout=max(min(patience, left), 0.01))
        except BusTimeout:
            if left <= patience:
                raise
            patience *= 2


def limit_of(op: Op) -> float:
    """The operation's own time limit, seconds."""
    if isinstance(op, Exec):
        return op.timeout_s
    return op.plan.timeout_s if isinstance(op, RunTests) else 0.0
