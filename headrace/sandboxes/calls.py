"""Requests to a node about its sandboxes that survive a reconnect and a lost reply, and the exceptions for refusals.

A node's reply travels on the connection that received the request. If that connection breaks in between, the reply is
lost without an error. So a request is repeated under the same ids, and the node answers a repeat from its record. `ask`
is the only retry loop.
"""

import time

from headrace.backoff import Backoff
from headrace.bus.connection import Bus
from headrace.bus.errors import BusTimeout, Disconnected, NoResponders
from headrace.errors import HeadraceError
from headrace.messages.base import Message
from headrace.messages.sandbox import Exec, FilesRefused, NoCapacity, Op, RunTests, SandboxLost

FIRST_WAIT_S = 4.0
"""How long the first request waits for its reply before it is repeated; each repeat waits twice as long."""
SILENCE_S = 5.0
"""How long a node that has no subscription may be reconnecting before it counts as silent."""
RETRY_S = 0.2
"""Mean delay between two requests to a node that is not reachable, in seconds."""


class Superseded(SandboxLost):
    """Another owner acquired this sandbox later, so calls under the old secret are refused."""


class NodeSilent(SandboxLost):
    """The node does not answer, so the state of its sandboxes is unknown."""


class CannotCopy(HeadraceError):
    """A node cannot copy this sandbox. The sandbox itself is unchanged."""


async def ask(
    bus: Bus,
    subject: str,
    message: Message,
    timeout: float,
    *,
    repeat: bool = True,
    patient: bool = True,
    owner: str = "",
) -> Message:
    """Send a request to one node until it answers.

    timeout: seconds to wait for an answer; a patient call waits a second time. repeat: whether the request may be sent
    again while the node may still run the first one (nodes recognise repeated calls and acquires by their ids).
    patient: wait up to `SILENCE_S` for a node without a subscription, then raise NodeSilent; also raise NodeSilent
    after the second timeout. An impatient call raises the first NoResponders, Disconnected or BusTimeout, so that the
    caller can try another node. owner: see `Bus.request`.
    """
    retry = Backoff(RETRY_S, RETRY_S, jitter=0.3)
    silent_since = 0.0
    last_chance = not patient
    deadline = time.monotonic() + timeout
    wait = Backoff(min(FIRST_WAIT_S, timeout) if repeat else timeout, timeout)
    while True:
        try:
            left = deadline - time.monotonic()
            return await bus.request(subject, message, timeout=max(min(wait.next(), left), 0.01), owner=owner)
        except BusTimeout as error:
            if time.monotonic() < deadline:
                continue
            if not patient:
                raise
            if last_chance:
                raise NodeSilent(f"{subject}: {error}") from None
            last_chance = True
            deadline = time.monotonic() + timeout
            wait.reset()
        except (NoResponders, Disconnected) as error:
            if not patient:
                raise
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > SILENCE_S:
                raise NodeSilent(f"{subject}: {error}") from None
            await retry.sleep()


FAILURES: dict[str, type[HeadraceError]] = {
    "no_room": NoCapacity,
    "lost": SandboxLost,
    "superseded": Superseded,
    "files_refused": FilesRefused,
}
"""The exception for each `SandboxReply.failure`; others are of the request's own kind."""


def refusal(reply: Message, subject: str, other: type[HeadraceError] = CannotCopy) -> HeadraceError:
    """The exception for a node's refusal. subject: the sandbox or group that the request was about. other: the
    exception for failures that `FAILURES` lacks."""
    failure, detail = getattr(reply, "failure", ""), getattr(reply, "detail", type(reply).__name__)
    return FAILURES.get(failure, other)(f"{subject}: {detail}")


def limit_of(op: Op) -> float:
    """The operation's own time limit in seconds; 0 if it has none."""
    if isinstance(op, Exec):
        return op.timeout_s
    return op.plan.timeout_s if isinstance(op, RunTests) else 0.0
