"""Sandboxes over request and reply.

`Sandboxes` belongs to one actor: it acquires sandboxes, renews their leases and releases them. Later slots of a group
are acquired at the node that gave the group's first one, so that they share the group's machine.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from headrace.backoff import Backoff
from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.messages.base import Message
from headrace.messages.sandbox import (
    EVERYWHERE,
    Acquire,
    Acquired,
    GroupKey,
    NoCapacity,
    ReleaseGroup,
    SandboxKey,
    SandboxLost,
    SandboxRefused,
    acquire_method,
    holders,
)
from headrace.messages.subjects import RPC, RPC_NODE, token
from headrace.sandboxes.calls import CannotCopy, NodeSilent, Superseded, ask, refusal
from headrace.sandboxes.remote import ANSWER_S, RemoteSandbox

__all__ = ["CannotCopy", "NodeSilent", "RemoteSandbox", "Sandboxes", "Superseded"]

ASK_AT_ONCE = 256
"""Most concurrent acquires of one actor that any node may answer. Without a bound, the acquires of a burst time out
and are repeated, and nodes make sandboxes for requests that no caller waits for."""
REMEMBER_GROUPS = 1024
"""Most groups whose node an actor remembers; the oldest entry is removed first."""
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 2.0
"""Delays between acquires while no node has capacity."""


def _waits() -> Backoff:
    return Backoff(FIRST_WAIT_S, MOST_WAIT_S, factor=1.6, jitter=0.5)


class _Group:
    """Callers that acquire sandboxes of one group; the first one chooses the node."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.callers = 0


class Sandboxes:
    """All sandboxes that one actor owns."""

    def __init__(
        self,
        bus: Bus,
        lease_s: float,
        waiting: Callable[[str, float], AbstractContextManager[None]] = lambda what, since: nullcontext(),
    ) -> None:
        """lease_s: length of a lease in seconds. waiting: a context manager that is entered while no node has capacity,
        with the reason and the time
        since when, so that the actor does not count that time as work and reports a wait that lasts."""
        self._bus = bus
        self._lease_s = lease_s
        self._waiting = waiting
        self._owned: set[RemoteSandbox] = set()
        self._nodes: OrderedDict[GroupKey, str] = OrderedDict()
        self._groups: dict[GroupKey, _Group] = {}
        self._asking = asyncio.Semaphore(ASK_AT_ONCE)
        self._waiters: dict[asyncio.Future[str], tuple[str, str]] = {}
        """The acquires that wait for capacity, the oldest first: the lane, and the one node that is asked or an empty
        text for any."""
        self._background: set[asyncio.Task[None]] = set()
        self._held: dict[str, tuple[RemoteSandbox, asyncio.Task[None]]] = {}
        self._heard = self._silent_since = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the first acquire after which no node has answered any; 0 while nodes answer. A refusal is an
        answer. While this actor is disconnected nothing is known about the nodes."""
        return time.monotonic() - self._silent_since if self._silent_since else 0.0

    def __len__(self) -> int:
        return len(self._owned)

    async def acquire(self, request: Acquire, *, node: str = "", patience_s: float = 600.0) -> RemoteSandbox:
        """Wait for capacity and acquire a sandbox for the request. With `node`, only on that node.

        NoCapacity after `patience_s` seconds; SandboxLost when a node could not create the sandbox; NodeSilent when
        `node` does not answer.
        """
        key = SandboxKey.of(request).in_group
        began = time.monotonic()
        deadline = began + patience_s
        group = self._groups.setdefault(key, _Group())
        group.callers += 1
        waits = _waits()
        try:
            while time.monotonic() < deadline:
                group_node = "" if node else self._nodes.get(key, "")
                if group_node:
                    # The group's node is known, so callers need no lock: slots are acquired concurrently.
                    sandbox = await self._ask(request, group_node)
                    if sandbox is not None:
                        return self._own(sandbox)
                    self._nodes.pop(key, None)
                async with group.lock:
                    # One caller at a time chooses the group's node or waits for capacity.
                    if not node and key in self._nodes:
                        continue
                    sandbox = await self._ask(request, node, patient=bool(node))
                    if sandbox is not None:
                        self._remember(key, sandbox.node)
                        return self._own(sandbox)
                    with self._waiting(f"capacity for a sandbox of {request.group}, slot {request.slot}", began):
                        await self._until_released(waits.next(), request.lane, node)
            waited_s, silent_s = time.monotonic() - began, self.silent_s
            error = NoCapacity(
                f"no environment node of run {request.run} answered for {silent_s:.0f} s: start one with `headrace "
                f"actor environment --config TOML --run {request.run}`"
                if silent_s
                else f"no node had capacity for {request.group} within {waited_s:.0f} s"
            )
            error.waited_s = waited_s
            raise error
        finally:
            group.callers -= 1
            if not group.callers:
                self._groups.pop(key, None)

    async def _until_released(self, seconds: float, lane: str, node: str) -> None:
        """Wait until a sandbox of this actor is released whose place this caller may get, at most `seconds`."""
        released: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters[released] = lane, node
        try:
            async with asyncio.timeout(seconds):
                await released
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if released.done() and not released.cancelled():
                self._wake(released.result())  # the place is for another caller
            raise
        finally:
            self._waiters.pop(released, None)

    def _wake(self, node: str) -> None:
        """Wake the oldest waiting acquire of each lane that may get a place on `node`.

        One place is free. If all acquires asked for it, n attempts that wait would send n requests for each release.
        One of each lane asks, because a node may have capacity for one lane and none for another.
        """
        woken = set[tuple[str, str]]()
        for released, (lane, wanted) in list(self._waiters.items()):
            if not released.done() and wanted in ("", node) and (lane, wanted) not in woken:
                woken.add((lane, wanted))
                released.set_result(node)

    async def _ask(self, request: Acquire, node: str, patient: bool = False) -> RemoteSandbox | None:
        """Acquire at one node, or at any node. None when the node has no capacity, or no node answered yet."""
        asked = time.monotonic()
        try:
            if node:
                subject = RPC_NODE.at(service="environment", caller=self._bus.role, node=node, method="acquire")
                reply = await ask(self._bus, subject, request, ANSWER_S, patient=patient)
            else:
                async with self._asking:
                    reply = await self._ask_any(request)
        except (NoResponders, BusTimeout):
            # Acquiring again is safe: the same key gets the same sandbox.
            self._silent_since = self._silent_since or max(asked, self._heard)
            return None
        except Disconnected:
            self._silent_since = 0.0
            return None
        self._heard, self._silent_since = time.monotonic(), 0.0
        if isinstance(reply, Acquired):
            return RemoteSandbox(self._bus, reply, self._lease_s, request.group)
        other = SandboxRefused if getattr(reply, "failure", "") == "refused" else SandboxLost
        error = refusal(reply, f"no sandbox for {request.group}", other)
        if isinstance(error, NoCapacity):
            return None
        raise error

    async def _ask_any(self, request: Acquire) -> Message:
        """Acquire at a node that holds the request's image; at any node where none does. A holder that is full is
        waited for: a node without the image could not serve the request.

        The request is sent once: another node might answer a repeat, and then two nodes would create a sandbox.
        """
        method = acquire_method(token(request.run))
        if request.template != EVERYWHERE:
            subject = RPC_NODE.at(
                service="environment", caller=self._bus.role, node=holders(request.template), method=method
            )
            with suppress(NoResponders):
                return await self._bus.request(subject, request, timeout=ANSWER_S)
        return await self._bus.request(
            RPC.at(service="environment", caller=self._bus.role, method=method), request, timeout=ANSWER_S
        )

    async def fork(self, sandbox: RemoteSandbox, into: Sequence[Acquire]) -> list[RemoteSandbox]:
        """`RemoteSandbox.fork`; this actor owns the copies."""
        return [self._own(copy) for copy in await sandbox.fork(into)]

    def _own(self, sandbox: RemoteSandbox) -> RemoteSandbox:
        self._owned.add(sandbox)
        return sandbox

    def _remember(self, key: GroupKey, node: str) -> None:
        self._nodes[key] = node
        if len(self._nodes) > REMEMBER_GROUPS:
            self._nodes.popitem(last=False)

    def give_back(self, sandbox: RemoteSandbox) -> None:
        """Release in the background. If the request is lost, the lease ends the sandbox."""
        self._owned.discard(sandbox)
        task = asyncio.create_task(self._release(sandbox))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def release(self, sandbox: RemoteSandbox) -> None:
        """Release now. If the node cannot be reached, the lease ends the sandbox."""
        self._owned.discard(sandbox)
        await self._release(sandbox)

    def stop_renewing(self, sandbox: RemoteSandbox) -> None:
        """Neither renew the sandbox's lease nor release it, because another actor takes it over."""
        self._owned.discard(sandbox)

    def hold(self, sandbox: RemoteSandbox, name: str, seconds: float) -> None:
        """Renew a sandbox's lease for `seconds`, then release it. The renewals end earlier when any actor acquires
        it."""

        async def release_later() -> None:
            await asyncio.sleep(seconds)
            await self.release_held(name)

        self.forget(name)
        self._owned.add(sandbox)
        self._held[name] = sandbox, asyncio.create_task(release_later())

    async def release_all_held(self, prefix: str) -> None:
        """Release the sandboxes that are held under names with this prefix."""
        for name in [name for name in self._held if name.startswith(prefix)]:
            await self.release_held(name)

    def forget(self, name: str) -> None:
        """Stop the renewals of the sandbox held under this name; its next owner renews the lease."""
        if name in self._held:
            sandbox, timer = self._held.pop(name)
            timer.cancel()
            self._owned.discard(sandbox)

    async def release_held(self, name: str) -> None:
        """Release the sandbox held under this name, if there is one."""
        if name in self._held:
            sandbox, timer = self._held.pop(name)
            await self.release(sandbox)
            timer.cancel()

    async def _release(self, sandbox: RemoteSandbox) -> None:
        try:
            await sandbox.release()
        except (NoResponders, BusTimeout, Disconnected):
            return
        self._wake(sandbox.node)

    async def release_group(self, key: GroupKey) -> None:
        """Tell the group's node that no further sandbox of it will be acquired. Without an answer, the node's idle
        timer ends the group's machine."""
        node = self._nodes.pop(key, "")
        if node:
            subject = RPC_NODE.at(service="environment", caller=self._bus.role, node=node, method="release_group")
            try:
                await self._bus.request(subject, ReleaseGroup(**key._asdict()), timeout=ANSWER_S)
            except (NoResponders, BusTimeout, Disconnected):
                return

    async def renew(self) -> None:
        """Renew the leases that no call renewed for a third of their length. Call this every third of a lease."""
        now = time.monotonic()
        due = [sandbox for sandbox in self._owned if now - sandbox.renewed > self._lease_s / 3]
        await asyncio.gather(*(self._renew(sandbox) for sandbox in due))

    async def _renew(self, sandbox: RemoteSandbox) -> None:
        try:
            ok = await sandbox.renew()
        except (NoResponders, BusTimeout, Disconnected):
            return
        if not ok:
            # The next call raises SandboxLost for its caller.
            self._owned.discard(sandbox)

    async def close(self) -> None:
        """Wait for the releases that have started. Held sandboxes end when their leases expire."""
        for name in [*self._held]:
            self.forget(name)
        await asyncio.gather(*self._background)
