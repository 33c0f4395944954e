"""`RemoteSandbox`: a sandbox on some node, over request and reply."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.sandbox import (
    Acquire,
    Acquired,
    Fork,
    Forked,
    Op,
    OpResult,
    Release,
    Renew,
    SandboxCall,
    SandboxLost,
    SandboxReply,
)
from headrace.messages.subjects import RPC_NODE
from headrace.sandboxes.calls import SILENCE_S, CannotCopy, NodeSilent, Superseded, ask, limit_of, refusal

ANSWER_S = 30.0
"""Time beyond the operation's own limit in which a node must answer; a clone on a busy node takes seconds."""
PULSE_S = 2.0
"""Seconds between two renewals while a call runs. They detect a node that ended, which never answers the call."""


class RemoteSandbox:
    """A sandbox on some node. Methods raise SandboxLost (or NodeSilent, Superseded) when it cannot be used any more."""

    def __init__(self, bus: Bus, acquired: Acquired, lease_s: float, group: str) -> None:
        """group: the group that acquired it; calls and answers over 1 MiB are stored under its user."""
        self._bus = bus
        self._owner = group.rpartition(".")[0]
        self._acquired = acquired
        self._lease_s = lease_s
        self.id, self.node, self.backend = acquired.sandbox, acquired.node, acquired.backend
        self.machine = acquired.machine
        """Content address of what its machine was made of; empty where the backend cannot tell."""
        self.digest = acquired.digest or ""
        """Of its workspace before the first call; empty where `Acquired` has none."""
        self.capabilities = frozenset(acquired.capabilities)
        """Names of what its backend can do (vmhost/backend.py)."""
        self.plugins = acquired.plugins
        """Its backend's identity, if the backend is a plugin, and its harness's."""
        self.harness = acquired.harness
        """Unset without one."""
        self.fresh = acquired.epoch == 1
        """Whether this is its first owner."""
        self.renewed = time.monotonic()
        """When its node last renewed the lease (`time.monotonic`); every answered call renews it too."""

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation. A repeat with the same `call_id` is answered from the node's record."""
        acquired = self._acquired
        call = SandboxCall(
            sandbox=acquired.sandbox,
            secret=acquired.secret,
            epoch=acquired.epoch,
            call_id=call_id or uuid.uuid4().hex,
            op=op,
        )
        answer = asyncio.ensure_future(
            # Twice: a node may wait for earlier calls, and finds out who ended a sandbox, before it answers.
            ask(self._bus, self.subject("call"), call, limit_of(op) + 2 * ANSWER_S, owner=self._owner)
        )
        try:
            await asyncio.wait({answer}, timeout=PULSE_S)
            if not answer.done():
                await self._until_answered(answer)
        finally:
            answer.cancel()
        reply = answer.result()
        self.renewed = time.monotonic()
        if isinstance(reply, SandboxReply):
            if reply.result is not None:
                return reply.result
            if reply.failure == "bad_request":
                return OpResult(ok=False, error=reply.detail or "the node cannot run this operation")
            if reply.failure == "refused":
                raise Superseded(f"{self.id}: {reply.detail}")
            raise SandboxLost(f"{self.id}: {reply.detail or reply.failure}")
        raise SandboxLost(f"{self.id}: {getattr(reply, 'detail', type(reply).__name__)}")

    async def _until_answered(self, answer: asyncio.Future[Message]) -> None:
        """Wait for the answer of a long call. Its exception says why the node can no longer give one."""
        watch = asyncio.ensure_future(self._until_lost())
        both: set[asyncio.Future[Any]] = {answer, watch}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise watch.result()
        finally:
            watch.cancel()

    async def _until_lost(self) -> SandboxLost:
        """Wait until the node can no longer answer a running call; return the exception that says why."""
        silent_since = 0.0
        while True:
            try:
                ack = await self._renew(PULSE_S)  # without a bound, this would wait for a node that ends meanwhile
            except NoResponders as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > SILENCE_S:
                    return NodeSilent(f"{self.id}: {error}")
            except (BusTimeout, Disconnected):
                pass
            else:
                silent_since = 0.0
                if ack.code == "lost":
                    # The node restarted. A new owner is no reason to return: the call's own answer reports it.
                    return SandboxLost(f"{self.id}: {ack.detail}")
            await asyncio.sleep(PULSE_S)

    async def renew(self) -> bool:
        """Renew the lease; False when the sandbox is gone or has another owner."""
        return (await self._renew(ANSWER_S)).ok

    async def _renew(self, timeout: float) -> Ack:
        acquired = self._acquired
        request = Renew(sandbox=acquired.sandbox, secret=acquired.secret, epoch=acquired.epoch, lease_s=self._lease_s)
        reply = await self._bus.request(self.subject("renew"), request, timeout=timeout)
        self.renewed = time.monotonic()
        return reply if isinstance(reply, Ack) else Ack(ok=False, detail=type(reply).__name__)

    async def release(self) -> None:
        """End the ownership. BusError when the node cannot be reached; the sandbox then ends with its lease."""
        acquired = self._acquired
        request = Release(sandbox=acquired.sandbox, secret=acquired.secret, epoch=acquired.epoch)
        await self._bus.request(self.subject("release"), request, timeout=ANSWER_S)

    async def fork(self, into: Sequence[Acquire]) -> list["RemoteSandbox"]:
        """Copy this sandbox once per request; the copies and this sandbox continue from its present state.

        into: requests with this sandbox's run, lane and role, and new keys. The sandbox needs a machine of its own
        (isolation ``episode``) and no running call. CannotCopy, NoCapacity, SandboxLost.
        """
        acquired = self._acquired
        request = Fork(sandbox=acquired.sandbox, secret=acquired.secret, epoch=acquired.epoch, into=tuple(into))
        try:
            reply = await self._bus.request(self.subject("fork"), request, timeout=ANSWER_S)
        except (NoResponders, BusTimeout, Disconnected) as error:
            raise CannotCopy(f"{self.id}: {error}") from None
        if isinstance(reply, Forked):
            pairs = zip(reply.held, into, strict=True)
            return [RemoteSandbox(self._bus, copy, self._lease_s, asked.group) for copy, asked in pairs]
        raise refusal(reply, self.id)

    def subject(self, method: str) -> str:
        """The subject on which its node serves a method."""
        return RPC_NODE.at(service="environment", caller=self._bus.role, node=self.node, method=method)
