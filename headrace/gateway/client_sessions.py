"""Finds the session that a request continues, for agents that run their own tools.

A client is stateless: each request carries the whole history. A request continues a session when both have the same
tools and the session's history is a proper prefix of the request's history. The gateway finds the session by the name
that the client gives, otherwise by its history. When a client rewrites its history (it compacts its context, or puts a
date into its system prompt), a new segment begins, and the session counts the rewrite: sampled ids are never changed
and never encoded again.

A gateway may hold a hundred thousand open sessions, so a request searches through none of them: indexes have the
sessions of each user, the session with each name, and the sessions with each history, under a digest of the whole
history. A request without a name looks up its own beginnings there, the longest first.

A session stores digests only, so HR_SESSION contains no text of these users. A call's digest covers its id and name. It
leaves out the arguments, because clients write the same JSON in different ways.
"""

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headrace.gateway.conversation import ModelRequest
from headrace.messages.product import ClientMessage, ClientSession, ClientTool
from headrace.messages.rollout import PolicyRef

T = TypeVar("T")
NAMED, BY_HISTORY, BEGUN, UNATTRIBUTED = "turns_named", "turns_by_history", "turns_begun", "turns_unattributed"
"""How a turn came to its session: by name; by its history; without earlier turns; or its earlier turns belong to no
open session, so it begins one and those turns are in no record of it."""


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


class Name(NamedTuple):
    """The name of a session is the client's own, so two users or tenants may give the same."""

    user: str
    tenant: str
    name: str


class Past(NamedTuple):
    """The things that an unnamed session and a request that continues it have in common."""

    user: str
    tenant: str
    head: str
    history: str
    """Digest of all messages of the session."""


def _pasts(digests: Sequence[str]) -> Iterator[str]:
    """The digest of every beginning of a history, the shortest first."""
    past = ""
    for each in digests:
        past = hashlib.sha256(f"{past} {each}".encode()).hexdigest()
        yield past


class ClientSessions:
    """The open sessions of a gateway."""

    def __init__(self, sessions: Sequence[ClientSession] = ()) -> None:
        self._sessions: dict[str, ClientSession] = {}
        self._of_user: dict[str, dict[str, None]] = {}
        self._of_past: dict[Past, dict[str, None]] = {}
        """The groups of the sessions of each user, and of the sessions with each past; dicts as ordered sets."""
        self._of_name: dict[Name, str] = {}
        self.turns = Counter[str](dict.fromkeys((NAMED, BY_HISTORY, BEGUN, UNATTRIBUTED), 0))
        """Turns so far by the way in which they came to their session."""
        for session in sessions:
            self._put(session)

    def _put(self, session: ClientSession) -> None:
        """Store a session in place of its earlier state."""
        self.close(session.group)
        self._sessions[session.group] = session
        self._of_user.setdefault(_user(session), {})[session.group] = None
        if (past := _past(session)) is not None:
            self._of_past.setdefault(past, {})[session.group] = None
        if session.named:
            self._of_name[_name(session)] = session.group

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
            named = self._of_name.get(Name(user, tenant, request.session))
            session = None if named is None else self._sessions[named]
            self.turns[NAMED] += 1
        else:
            session = self._by_history(tuple(map(digest, request.messages)), head_of(request.tools), tenant, user)
            answered = any(message.role == "assistant" for message in request.messages)
            self.turns[BY_HISTORY if session is not None else UNATTRIBUTED if answered else BEGUN] += 1
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
            self._put(session)
        return session

    def go_on(self, group: str, request: ModelRequest) -> Placed:
        """Place a request in its session's current segment, or begin a new segment."""
        session = self._sessions[group]
        if session.head == head_of(request.tools) and _is_continued(
            session.history, tuple(map(digest, request.messages))
        ):
            return Placed(session, len(session.history))
        if session.history:  # without a history the first turn failed, so the client rewrote nothing
            session = self.begin_segment(group, session.segment + 1)
        return Placed(session, 0)

    def begin_segment(self, group: str, segment: int) -> ClientSession:
        """Begin a new segment of a session, which holds none of its messages yet."""
        session = self._sessions[group]
        session = msgspec.structs.replace(session, history=(), segment=segment, rewrites=session.rewrites + 1)
        self._put(session)
        return session

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
        self._put(session)
        return session

    def close(self, group: str) -> ClientSession | None:
        """Forget an open session and return it."""
        session = self._sessions.pop(group, None)
        if session is not None:
            _remove(self._of_user, _user(session), group)
            if (past := _past(session)) is not None:
                _remove(self._of_past, past, group)
            if session.named and self._of_name.get(_name(session)) == group:
                del self._of_name[_name(session)]
        return session

    def idle(self, seconds: float) -> list[ClientSession]:
        """Sessions that received no request for this many seconds."""
        before = time.time() - seconds
        return [session for session in self._sessions.values() if session.last_used < before]

    def of_user(self, user: str) -> list[ClientSession]:
        """All open sessions of a user."""
        return [self._sessions[group] for group in self._of_user.get(user, ())]

    def _by_history(self, digests: tuple[str, ...], head: str, tenant: str, user: str) -> ClientSession | None:
        """The user's unnamed session whose history is the longest prefix of `digests`; None if there is none."""
        for past in reversed([*_pasts(digests[:-1])]):
            for group in self._of_past.get(Past(user, tenant, head, past), ()):
                return self._sessions[group]
        return None


def _user(session: ClientSession) -> str:
    return session.group.partition(".")[0]


def _name(session: ClientSession) -> Name:
    return Name(_user(session), session.tenant, session.named)


def _past(session: ClientSession) -> Past | None:
    """The past under which a session is found; None where only its name finds it."""
    if session.named or not session.history:
        return None
    *_, whole = _pasts(session.history)
    return Past(_user(session), session.tenant, session.head, whole)


def _remove(index: dict[T, dict[str, None]], key: T, group: str) -> None:
    groups = index[key]
    del groups[group]
    if not groups:
        del index[key]


def _untrainable(session: ClientSession, request: ModelRequest) -> str:
    """Why the turns of a session cannot be trained on together; empty when they can."""
    if request.temperature <= 0.0:
        return "sampled greedily, which has no log-probabilities to train on"
    if request.temperature != session.temperature:
        return f"its turns were sampled at temperatures {session.temperature:g} and {request.temperature:g}"
    return ""


def _is_continued(history: tuple[str, ...], digests: tuple[str, ...]) -> bool:
    return 0 < len(history) < len(digests) and digests[: len(history)] == history
