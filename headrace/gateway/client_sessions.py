"""Sessions of agents that run their own tools: which request continues which session.

The idea: a client is stateless and sends its whole history each turn. A request continues a session when the session's
history is a proper prefix of the request's. The session is found by the name that the client gives it, else by its
history. Where a client rewrote its history (it compacted its context, or put a date into its system prompt), a new
segment begins, and the rewrite is counted: sampled ids are never changed and never encoded again.

Only digests are kept: HR_SESSION holds no text of these users. A call's arguments are left out of its digest, because
clients spell the same JSON differently; its id and name are included.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headrace.gateway.conversation import ModelRequest
from headrace.messages.product import ClientMessage, ClientSession, ClientTool
from headrace.messages.rollout import PolicyRef


def digest(message: ClientMessage) -> str:
    """The digest of a message in a history."""
    calls = [(call.id, call.name) for call in message.calls]
    parts = (message.role, message.text.strip(), calls, message.call_id)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def head_of(tools: Sequence[ClientTool]) -> str:
    """The digest of a set of tools."""
    return hashlib.sha256(msgspec.json.encode(tools, order="sorted")).hexdigest()[:16]


class Placed(NamedTuple):
    """The session and segment that a request belongs to."""

    session: ClientSession
    known: int
    """Messages that the session's segment holds already; 0 when a segment begins."""


class ClientSessions:
    """The open sessions of a gateway."""

    def __init__(self, sessions: Sequence[ClientSession] = ()) -> None:
        self._sessions = {session.group: session for session in sessions}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, group: str) -> ClientSession | None:
        """An open session."""
        return self._sessions.get(group)

    def place(
        self, request: ModelRequest, tenant: str, user: str, training: bool, policy_of: Callable[[str], PolicyRef]
    ) -> ClientSession:
        """The session that a request continues, or a new one. user: the hash that names the user on the bus. policy_of:
        the version for a new session, by its name."""
        if request.session:
            session = self._named(request.session, tenant, user)
        else:
            session = self._by_history(tuple(map(digest, request.messages)), head_of(request.tools), tenant, user)
        if session is None:
            group = f"{user}.{secrets.token_hex(6)}"
            session = ClientSession(
                group=group,
                tenant=tenant,
                named=request.session,
                head="",
                history=(),
                segment=0,
                training_allowed=training,
                policy=policy_of(group),
                temperature=request.temperature,
                last_used=time.time(),
            )
            self._sessions[session.group] = session
        return session

    def go_on(self, group: str, request: ModelRequest) -> Placed:
        """How a session continues with a request: in its segment, or in a new one."""
        session = self._sessions[group]
        if session.head == head_of(request.tools) and _goes_on(session.history, tuple(map(digest, request.messages))):
            return Placed(session, len(session.history))
        if session.history:  # else its first turn failed, and nothing was rewritten
            session = msgspec.structs.replace(
                session, history=(), segment=session.segment + 1, rewrites=session.rewrites + 1
            )
            self._sessions[group] = session
        return Placed(session, 0)

    def took(self, session: ClientSession, request: ModelRequest, reply: ClientMessage) -> ClientSession:
        """The session after a turn: its ids hold the request's history and the reply."""
        history = (*map(digest, request.messages), digest(reply))
        untrainable = session.untrainable or _untrainable(session, request)
        session = msgspec.structs.replace(
            session,
            head=head_of(request.tools),
            history=history,
            untrainable=untrainable,
            last_used=time.time(),
        )
        self._sessions[session.group] = session
        return session

    def close(self, group: str) -> ClientSession | None:
        """Forget an open session and return it."""
        return self._sessions.pop(group, None)

    def idle(self, seconds: float) -> list[ClientSession]:
        """Sessions without a request for so long."""
        before = time.time() - seconds
        return [session for session in self._sessions.values() if session.last_used < before]

    def of_user(self, user: str) -> list[ClientSession]:
        """All open sessions of a user."""
        return [session for session in self._sessions.values() if session.group.startswith(f"{user}.")]

    def _named(self, name: str, tenant: str, user: str) -> ClientSession | None:
        return next((s for s in self.of_user(user) if s.named == name and s.tenant == tenant), None)

    def _by_history(self, digests: tuple[str, ...], head: str, tenant: str, user: str) -> ClientSession | None:
        """The session with the longest history that is a prefix of this one."""
        fitting = [
            session
            for session in self.of_user(user)
            if session.tenant == tenant
            and not session.named
            and session.head == head
            and session.history
            and _goes_on(session.history, digests)
        ]
        return max(fitting, key=lambda session: len(session.history), default=None)


def _untrainable(session: ClientSession, request: ModelRequest) -> str:
    """Why the turns of a session cannot be trained on together; empty when they can."""
    if request.temperature <= 0.0:
        return "sampled greedily, which has no log-probabilities to train on"
    if request.temperature != session.temperature:
        return f"its turns were sampled at temperatures {session.temperature:g} and {request.temperature:g}"
    return ""


def _goes_on(history: tuple[str, ...], digests: tuple[str, ...]) -> bool:
    return 0 < len(history) < len(digests) and digests[: len(history)] == history
