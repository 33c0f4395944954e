"""Finds the session that a request continues, for agents that run their own tools.

A client is stateless: each request carries the whole history. A request continues a session when both have the same
tools and the session's history is a proper prefix of the request's history. The gateway finds the session by the name
that the client gives, otherwise by its history. When a client rewrites its history (it compacts its context, or puts a
date into its system prompt), a new segment begins, and the session counts the rewrite: sampled ids are never changed
and never encoded again.

A session stores digests only, so HR_SESSION contains no text of these users. A call's digest covers its id and name. It
leaves out the arguments, because clients write the same JSON in different ways.
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
    """Number of the request's messages that the segment already contains; 0 when a segment begins."""


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
        returns the policy version for the name of a new session."""
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
        """Place a request in its session's current segment, or begin a new segment."""
        session = self._sessions[group]
        if session.head == head_of(request.tools) and _is_continued(
            session.history, tuple(map(digest, request.messages))
        ):
            return Placed(session, len(session.history))
        if session.history:  # without a history the first turn failed, so the client rewrote nothing
            session = msgspec.structs.replace(
                session, history=(), segment=session.segment + 1, rewrites=session.rewrites + 1
            )
            self._sessions[group] = session
        return Placed(session, 0)

    def took(self, session: ClientSession, request: ModelRequest, reply: ClientMessage) -> ClientSession:
        """Record a turn: the session's history becomes the request's messages and the reply."""
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
        """Sessions that received no request for this many seconds."""
        before = time.time() - seconds
        return [session for session in self._sessions.values() if session.last_used < before]

    def of_user(self, user: str) -> list[ClientSession]:
        """All open sessions of a user."""
        return [session for session in self._sessions.values() if session.group.startswith(f"{user}.")]

    def _named(self, name: str, tenant: str, user: str) -> ClientSession | None:
        return next((s for s in self.of_user(user) if s.named == name and s.tenant == tenant), None)

    def _by_history(self, digests: tuple[str, ...], head: str, tenant: str, user: str) -> ClientSession | None:
        """The user's unnamed session whose history is the longest prefix of `digests`; None if there is none."""
        fitting = [
            session
            for session in self.of_user(user)
            if session.tenant == tenant
            and not session.named
            and session.head == head
            and session.history
            and _is_continued(session.history, digests)
        ]
        return max(fitting, key=lambda session: len(session.history), default=None)


def _untrainable(session: ClientSession, request: ModelRequest) -> str:
    """Why the turns of a session cannot be trained on together; empty when they can."""
    if request.temperature <= 0.0:
        return "sampled greedily, which has no log-probabilities to train on"
    if request.temperature != session.temperature:
        return f"its turns were sampled at temperatures {session.temperature:g} and {request.temperature:g}"
    return ""


def _is_continued(history: tuple[str, ...], digests: tuple[str, ...]) -> bool:
    return 0 < len(history) < len(digests) and digests[: len(history)] == history
