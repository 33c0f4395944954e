"""Asking a node about a sandbox, so that neither a reconnect nor a lost answer ends a call; and what refusals mean.

An answer is sent on the connection that heard the question, or not at all: the broker lets a node answer nowhere else.
When that connection broke in between, the answer is lost and nobody is told. Whoever asks therefore asks again, under
the same id, and is answered from the node's record.
"""

import asyncio
import random
import time

from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.messages.base import Message
from headrace.messages.sandbox import Exec, NoRoom, Op, RunTests, SandboxLost

FIRST_ASK_S = 4.0
"""When a node is asked again, and so on in doubling steps."""
SILENCE_S = 5.0
"""How long a node that does not listen may be reconnecting before its sandboxes count as lost."""


class Superseded(SandboxLost):
    """Another holder acquired this sandbox after us: whatever we were doing, we are not the one who does it now."""


class NodeSilent(SandboxLost):
    """The node does not answer at all, so nothing is known about what ran there."""


class CannotKeep(Exception):
    """A node can't copy this sandbox, or make one from a copy; the sandbox itself is as it was."""


async def persist(bus: Bus, subject: str, message: Message, timeout: float, again: bool = True) -> Message:
    """A request that survives a reconnecting node and a lost reply. NodeSilent when nobody answers for a while.

    again: whether it may be asked twice while the first one may still be worked on."""
    gone_since = 0.0
    timeouts = 0
    while True:
        try:
            if not again:
                return await bus.request(subject, message, timeout=timeout)
            return await ask_again(bus, subject, message, timeout)
        except (NoResponders, Disconnected) as error:
            gone_since = gone_since or time.monotonic()
            if time.monotonic() - gone_since > SILENCE_S:
                raise NodeSilent(f"{subject}: {error}") from None
            await asyncio.sleep(0.2 + 0.2 * random.random())
        except BusTimeout as error:
            timeouts += 1
            if timeouts == 2:
                raise NodeSilent(f"{subject}: {error}") from None


async def ask_again(bus: Bus, subject: str, message: Message, timeout: float) -> Message:
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


def refusal(reply: Message, who: str) -> Exception:
    """A node's refusal as the exception that its asker can act on."""
    failure, detail = getattr(reply, "failure", ""), getattr(reply, "detail", type(reply).__name__)
    kinds: dict[str, type[Exception]] = {"no_room": NoRoom, "lost": SandboxLost, "superseded": Superseded}
    return kinds.get(failure, CannotKeep)(f"{who}: {detail}")


def limit_of(op: Op) -> float:
    """The operation's own time limit, seconds."""
    if isinstance(op, Exec):
        return op.timeout_s
    return op.plan.timeout_s if isinstance(op, RunTests) else 0.0
