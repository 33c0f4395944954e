"""The asking side of the sandbox calls: `RemoteSandbox` is `messages.sandbox.Sandbox` over request and reply.

`Sandboxes` acquires them for one actor, keeps their leases alive and gives them back. Slots of one group are asked for
at the node that took the group's first one, so that they land in the group's VM.
"""

import asyncio
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from headrace.actors.sandbox_client_asking import (
    SILENCE_S,
    CannotKeep,
    NodeSilent,
    Superseded,
    ask_again,
    limit_of,
    persist,
    refusal,
)
from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.messages.operations import Ack
from headrace.messages.sandbox import (
    Acquire,
    Acquired,
    Checkpoint,
    Checkpointed,
    Fork,
    Forked,
    NoRoom,
    Op,
    OpResult,
    Release,
    ReleaseGroup,
    Renew,
    Restore,
    SandboxCall,
    SandboxLost,
    SandboxReply,
    acquire_method,
)
from headrace.messages.subjects import RPC, RPC_NODE, token

__all__ = ["CannotKeep", "NodeSilent", "RemoteSandbox", "Sandboxes", "Superseded"]

ANSWER_S = 30.0
"""What a node may take for an answer beyond the operation's own time limit; a clone on a busy host takes seconds."""
PULSE_S = 2.0
"""How often a node is asked, while a call runs there, whether it still has the sandbox: a dead one never answers."""
ASK_AT_ONCE = 256
"""Asks for any node that one actor has under way. Without a bound, a burst of asks outlives its own time limits, is
asked again, and every node makes sandboxes that nobody waits for any more."""
REMEMBER_GROUPS = 1024


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
        answer = asyncio.ensure_future(persist(self._bus, self.subject("call"), call, limit_of(op) + ANSWER_S))
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

    async def checkpoint(self, whole: bool = False) -> bytes:
        """The sandbox as it is now, for `Sandboxes.restore` on nodes with the same template files, or `whole`, on every
        node that made its template of the same parts. It needs a machine of its own (isolation ``episode``) and no
        call under way. CannotKeep, SandboxLost."""
        held = self._held
        request = Checkpoint(sandbox=held.sandbox, secret=held.secret, epoch=held.epoch, whole=whole)
        try:
            reply = await self._bus.request(self.subject("checkpoint"), request, timeout=ANSWER_S)
        except (NoResponders, BusTimeout, Disconnected) as error:
            raise CannotKeep(f"{self.id}: {error}") from None
        self.heard = time.monotonic()
        if isinstance(reply, Checkpointed):
            return reply.data
        raise refusal(reply, self.id)

    async def fork(self, into: Sequence[Acquire]) -> list["RemoteSandbox"]:
        """Sandboxes that go on from where this one is, one per request of its run, lane and role; this one goes on too.
        As with `checkpoint` it needs its machine for itself. CannotKeep, NoRoom, SandboxLost."""
        held = self._held
        request = Fork(sandbox=held.sandbox, secret=held.secret, epoch=held.epoch, into=tuple(into))
        try:
            reply = await self._bus.request(self.subject("fork"), request, timeout=ANSWER_S)
        except (NoResponders, BusTimeout, Disconnected) as error:
            raise CannotKeep(f"{self.id}: {error}") from None
        if isinstance(reply, Forked):
            return [RemoteSandbox(self._bus, one, self._lease_s) for one in reply.held]
        raise refusal(reply, self.id)

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
        self._asking = asyncio.Semaphore(ASK_AT_ONCE)
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
            subject = RPC.at(service="environment", method=acquire_method(token(request.run)))
        try:
            if insist:
                reply = await persist(self._bus, subject, request, ANSWER_S)
            elif node:
                reply = await ask_again(self._bus, subject, request, ANSWER_S)
            else:  # once: another node might answer the second time, and both would make one
                async with self._asking:
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

    async def fork(self, sandbox: RemoteSandbox, into: Sequence[Acquire]) -> list[RemoteSandbox]:
        """`RemoteSandbox.fork`, held from now on like the first."""
        return [self._hold(one) for one in await sandbox.fork(into)]

    async def restore(self, request: Acquire, data: bytes, node: str, patience_s: float = 600.0) -> RemoteSandbox:
        """A sandbox for the request that goes on from a checkpoint, on that node, waiting for room. The request must
        hold none there. CannotKeep when the node can't use the checkpoint; NoRoom, SandboxLost."""
        subject = RPC_NODE.at(service="environment", node=node, method="restore")
        deadline = time.monotonic() + patience_s
        pause = 0.1
        while True:
            reply = await persist(self._bus, subject, Restore(request=request, data=data), ANSWER_S, again=False)
            if isinstance(reply, Acquired):
                return self._hold(RemoteSandbox(self._bus, reply, self._lease_s))
            error = refusal(reply, request.group)
            if not isinstance(error, NoRoom) or time.monotonic() > deadline:
                raise error
            with self._waiting():
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(1.6 * pause, 2.0)

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

    async def release(self, sandbox: RemoteSandbox) -> None:
        """Release it now; one that can't be told of it ends with its lease."""
        self._held.discard(sandbox)
        await self._release(sandbox)

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
