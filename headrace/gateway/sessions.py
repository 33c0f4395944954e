"""The state machine of a gateway's sessions: which session a request continues, and the end of each turn and session.

Sessions are of two kinds, under ids of one form. A **run** of headrace's own agent is queued until a rollout actor has
sampled a turn, then running; finished and failed are its ends, which no later event changes. Every other session has
the turns that a **client's** agent asks for; the rest of this text is about these.

A session is one line of recorded turns under one id, which answers name, requests may name and ratings name. Sessions
form trees: the root's id names the tree, and a branch's id begins with it. A request that names an id, or a tree by the
own header of its client, is looked up in that tree alone. A request without a name is looked up by its history: each
client is stateless and sends all of it.

A request continues a session when its history is the session's record and a new part, no turn of the session is under
way, and no other session ever had the same record. Otherwise it begins a branch of the tree, or a tree of its own where
two sessions had that record: nobody can tell whose history it is. So a session has one conversation, and branches of
one history (samples side by side, sub-agents, an edited message, a compacted history) are sampled at once.

A repeated request (`Idempotency-Key`, a client's count of retries, or the same body after an answer that did not reach
its client) gets the recorded turn; it waits for one that is under way.

A session is open, ending or ended. One that is ending takes no new turn and ends after the turn under way, which is
answered and recorded as usual. Ended sessions are remembered for a while, with their records.

Everything is a digest, so HR_SESSION contains no text of a conversation. A call's digest covers its id and name, and
leaves out the arguments, because clients write the same JSON in different ways. Every lookup is by an index, because a
gateway may hold a hundred thousand sessions.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.gateway.conversation import ModelRequest
from headrace.gateway.errors import SENTENCES
from headrace.gateway.http import HttpRefused
from headrace.messages.ledger import SlotIssued
from headrace.messages.product import ApiKey, ClientMessage, ClientSession, RecordedTurn, TurnPlace
from headrace.messages.rollout import PolicyRef, RolloutRequest, Trajectory, TurnDone, TurnSampled
from headrace.messages.tasks import TaskRef

NAMED, BY_HISTORY, BEGUN, UNATTRIBUTED = "turns_named", "turns_by_history", "turns_begun", "turns_unattributed"
"""How a turn came to its session: by name; by its history; without earlier turns; or its earlier turns belong to no
session, or to more than one, so it begins one and those turns are in no record of it."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request, and what its headers name."""

    key: ApiKey
    user: str = ""
    """The end user; empty if the client names none."""
    session: str = ""
    """The id of a session; empty without one."""
    name: str = ""
    """The session as the client's own header names it."""
    retry: str = ""
    """The Idempotency-Key."""
    again: bool = False
    """The client counts this request as a retry."""
    gone: Callable[[], bool] = lambda: False
    """Whether the client's connection is lost."""


class Scope(NamedTuple):
    """Records are compared within one API key and one user."""

    key: str
    user: str


class Under(msgspec.Struct, kw_only=True, eq=False):
    """A turn under way. `group` changes where it goes on in a branch."""

    group: str
    index: int
    """Of the turn in its session."""
    scope: Scope
    record: RecordedTurn
    """Without its reply: `history` is of the request's."""
    training: bool
    temperature: float
    formatted: bool
    gone: Callable[[], bool]
    over: asyncio.Event

    @property
    def asked(self) -> list[tuple[Scope, str]]:
        """The digests of its request and of the key for repetitions, in its scope."""
        return [(self.scope, value) for value in (self.record.asked, self.record.retry) if value]


class Placed(NamedTuple):
    """The place of a request."""

    group: str
    known: int = 0
    """How many of the request's messages the session's record holds."""
    turn: Under | None = None
    """The new turn, which is under way now; None for a repeated request."""
    recorded: int = -1
    """The index of the recorded turn that answers a repeated request."""
    wait: Under | None = None
    """The turn under way that a repeated request waits for; then it is placed again."""


State = Literal["queued", "running", "finished", "failed"]


class Run:
    """A session of headrace's own agent. `changed` is set, and replaced by a new event, whenever it changes."""

    def __init__(self, request: RolloutRequest, started: float) -> None:
        """started: seconds since the epoch."""
        self.request = request
        self.started = started
        self.ended = 0.0
        self.state: State = "queued"
        self.turns: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        """Attempts that ended because of an infrastructure failure."""
        self.result: dict[str, Any] = {}
        self.trajectory = ""
        self.elsewhere = False
        """Another gateway opened it and issues its attempts."""
        self.changed = asyncio.Event()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def on_turn(self, record: TurnSampled | TurnDone) -> None:
        """Record a sampled turn or the results of its calls. Turns of earlier attempts are ignored."""
        if self.over or record.trajectory != self.request.trajectory:
            return
        self.state = "running"
        if isinstance(record, TurnSampled):
            calls = [
                {"name": call.name, "arguments": call.arguments, "error": call.error} for call in record.turn.calls
            ]
            self.turns.append({"index": record.turn.index, "calls": calls, "results": []})
        else:
            for turn in self.turns:
                if turn["index"] == record.index:
                    turn["results"] = [{"ok": result.ok, "output": result.output} for result in record.results]
        self._notify()

    def on_trajectory(self, trajectory: Trajectory, time_s: float) -> bool:
        """The session is finished; the changed files are its result. time_s: seconds since the epoch. Whether it ends
        by this."""
        if self.over:
            return False
        self.state = "finished"
        self.ended = time_s
        self.trajectory = trajectory.id
        self.result = {
            "outcome": trajectory.outcome,
            "files": {path: data.decode("utf-8", "replace") for path, data in trajectory.diff.items()},
            "deleted": list(trajectory.deleted),
        }
        self._notify()
        return True

    def at(self, attempt: int) -> bool:
        """Whether this attempt is under way."""
        return not self.over and attempt == self.request.attempt

    def on_retry(self, reason: str, detail: str) -> None:
        """The infrastructure failed during the attempt under way; the next one has no turns yet."""
        if self.over:
            return
        self._add_failure(reason, detail)
        request = msgspec.structs.replace(self.request, attempt=self.request.attempt + 1)
        self.request, self.state, self.turns = request, "queued", []
        self._notify()

    def on_failure(self, reason: str, detail: str = "") -> None:
        """The session has failed for good."""
        if self.over:
            return
        self._add_failure(reason, detail)
        self.state = "failed"
        self.ended = time.time()
        self.result = {"reason": reason, "text": SENTENCES.get(reason, reason)} | ({"detail": detail} if detail else {})
        self._notify()

    def _add_failure(self, reason: str, detail: str) -> None:
        text = SENTENCES.get(reason, reason)
        self.failures.append({"attempt": self.request.attempt, "reason": reason, "text": text, "detail": detail})

    @property
    def over(self) -> bool:
        """Whether the session has reached its end."""
        return self.state in {"finished", "failed"}

    def view(self) -> dict[str, Any]:
        """The session as the JSON object that its user receives."""
        return {
            "session": self.request.group,
            "state": self.state,
            "attempt": self.request.attempt,
            "turns": self.turns,
            "failures": self.failures,
            "result": self.result,
            "seconds": (self.ended or time.time()) - self.started,
        }


def root_of(group: str) -> str:
    """The id of the tree that a session belongs to."""
    return group.partition("-")[0]


def user_of(group: str) -> str:
    """The hash of the user whose session it is."""
    return group.partition(".")[0]


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


def _said(message: ClientMessage) -> tuple[object, ...]:
    return message.role, message.text.strip(), [(call.id, call.name) for call in message.calls], message.call_id


def _heads(request: ModelRequest, head: str) -> tuple[str, ...]:
    """The digest of every beginning of a history, the shortest first. head: of what precedes it: its tools, or a
    recorded turn."""
    heads = []
    for message in request.messages:
        heads.append(head := _digest((head, _said(message))))
    return tuple(heads)


def _asked(request: ModelRequest) -> str:
    """The digest of a whole request; streamed or not, it asks for the same turn."""
    return _digest(msgspec.structs.replace(request, stream=False, include_usage=False, user=""))


class Sessions:
    """The sessions of a gateway's run; other gateways' sessions are among them."""

    def __init__(self, sessions: Iterable[ClientSession] = ()) -> None:
        self.runs: dict[str, Run] = {}
        """Of headrace's own agent."""
        self._sessions: dict[str, ClientSession] = {}
        self._index: dict[tuple[str, ...], dict[str, None]] = {}
        """The sessions by everything that they are looked up by (`_keys`); the inner dicts are ordered sets."""
        self._trees = OrderedDict[str, float]()
        """When a turn last began or ended in each tree, the longest ago first."""
        self._under: dict[str, Under] = {}
        self._asking = defaultdict[tuple[Scope, str], list[Under]](list)
        """The turns under way by the digests of a whole request and of its key for repetitions."""
        self._ending: set[str] = set()
        self.turns = Counter[str](dict.fromkeys((NAMED, BY_HISTORY, BEGUN, UNATTRIBUTED), 0))
        """Turns so far by the way in which they came to their session."""
        for session in sessions:
            self.put(session)

    def get(self, group: str) -> ClientSession | None:
        """A session, open or remembered."""
        return self._sessions.get(group)

    def sampling(self, group: str) -> bool:
        """Whether a turn of a session is under way."""
        return group in self._under

    def tree(self, group: str) -> list[ClientSession]:
        """All sessions of a session's tree, the root first."""
        return sorted(self._found("tree", root_of(group)), key=lambda session: session.group)

    def of_user(self, user: str) -> list[ClientSession]:
        """All sessions of a user."""
        return self._found("user", user)

    def _found(self, *key: str) -> list[ClientSession]:
        return [self._sessions[group] for group in self._index.get(key, ())]

    def put(self, session: ClientSession) -> None:
        """Store a session in place of its earlier state, as this gateway or another one changed it."""
        before = self._sessions.get(session.group)
        self._sessions[session.group] = session
        if session.last_used > self._trees.get(root := root_of(session.group), -1.0):
            self._trees[root] = session.last_used
            self._trees.move_to_end(root)
        for key in _keys(session, len(before.turns) if before is not None else 0):
            self._index.setdefault(key, {})[session.group] = None

    def drop(self, group: str) -> None:
        """Forget a session. A turn of it that is under way is answered, and recorded nowhere here."""
        session = self._sessions.pop(group, None)
        for key in _keys(session) if session is not None else ():
            if (groups := self._index.get(key)) is not None:  # two turns may have the same key
                groups.pop(group, None)
                if not groups:
                    del self._index[key]
                    if key[0] == "tree":
                        self._trees.pop(key[1], None)

    # Turns

    def open(
        self, caller: Caller, user: str, policy: Callable[[str], PolicyRef], labels: dict[str, str], named: str = ""
    ) -> ClientSession:
        """A new tree. user: the hash that names the user on the bus. policy: the version of a new session, by its
        name."""
        group = f"{user}.{secrets.token_hex(6)}"
        session = ClientSession(
            group=group,
            tenant=caller.key.tenant,
            key=caller.key.id,
            named=named,
            training_allowed=caller.key.training,
            policy=policy(group),
            labels=labels,
            last_used=time.time(),
        )
        self.put(session)
        return session

    def place(
        self,
        request: ModelRequest,
        caller: Caller,
        user: str,
        policy: Callable[[str], PolicyRef],
        sure: bool = True,
    ) -> Placed | None:
        """Place a request. A new turn is under way until `took` or `over`. sure: False gives None for a request that
        names an unknown tree or continues no known session: another gateway may have stored it a moment ago.
        HttpRefused with 404 and 409."""
        tree = self._named(caller, user)
        scope = Scope(caller.key.id, user) if tree is None else _scope(tree)
        asked, tools = _asked(request), _digest(request.tools)
        before = self._recorded(request.previous, tools) if request.previous is not None else None
        session: ClientSession | None
        heads = _heads(request, tools if before is None else before.history)
        retry = _digest((caller.retry, request.sample)) if caller.retry else ""
        if (repeated := self._repeated(scope, tree, asked, retry, caller)) is not None:
            return repeated
        if before is not None and request.previous is not None:
            session, prefix = self._sessions[request.previous.group], 0
        else:
            session, prefix = self._continued(scope, tree, heads)
        answered = any(message.role == "assistant" for message in request.messages)
        if session is None and not sure and (answered or caller.name):
            return None
        if tree is not None or before is not None:
            self.turns[NAMED] += 1
        else:
            self.turns[BY_HISTORY if session is not None else UNATTRIBUTED if answered else BEGUN] += 1
        if session is None:
            session = self.open(caller, user, policy, {}, caller.name)
        elif not self._free(session, before.history if before is not None else heads[prefix - 1] if prefix else ""):
            session, prefix = self._branch(session, policy), 0
        turn = Under(
            group=session.group,
            index=len(session.turns),
            scope=scope,
            record=RecordedTurn(history=heads[-1], asked=asked, tools=tools, retry=retry),
            training=caller.key.training,
            temperature=request.temperature,
            formatted=bool(request.answer),
            gone=caller.gone,
            over=asyncio.Event(),
        )
        self._begins(turn)
        return Placed(session.group, prefix, turn)

    def _recorded(self, place: TurnPlace, tools: str) -> RecordedTurn:
        """A turn that a request goes on behind. HttpRefused with 400 and 404."""
        session = self._sessions.get(place.group)
        turn = RecordedTurn(history="", asked="")
        if session is not None and place.index < len(session.turns):
            turn = session.turns[place.index]
        if not turn.history:
            raise HttpRefused(404, "the record of the previous response is gone: send the history as input")
        if turn.tools and turn.tools != tools:
            raise HttpRefused(
                400, "tools: expected the previous response's tools; for others send the history as input"
            )
        return turn

    def branch(self, turn: Under, policy: Callable[[str], PolicyRef]) -> None:
        """Go on with a turn in a branch, because the record of its session has a turn that this gateway does not know.
        HttpRefused with 409."""
        session = self._sessions.get(turn.group)
        self.over(turn)
        if session is None:
            raise HttpRefused(409, GONE)
        turn.group, turn.index, turn.over = self._branch(session, policy).group, 0, asyncio.Event()
        self._begins(turn)

    def took(self, turn: Under, reply: ClientMessage) -> ClientSession:
        """Record a turn: the session's new state. HttpRefused with 409 where the session was dropped meanwhile."""
        session = self._sessions.get(turn.group)
        self.over(turn)
        if session is None:
            raise HttpRefused(409, GONE)
        history = _digest((turn.record.history, _said(reply)))
        recorded = msgspec.structs.replace(turn.record, history=history, lost=turn.gone())
        session = msgspec.structs.replace(
            session,
            turns=(*session.turns, recorded),
            training_allowed=session.training_allowed and turn.training,
            temperature=session.temperature if session.turns else turn.temperature,
            untrainable=session.untrainable or _untrainable(session, turn),
            last_used=time.time(),
        )
        self.put(session)
        return session

    def answered(self, group: str, index: int, lost: bool) -> ClientSession | None:
        """Whether a recorded turn's answer was lost on its way: the session's new state, None if it is as before."""
        session = self._sessions.get(group)
        if session is None or index >= len(session.turns) or session.turns[index].lost == lost:
            return None
        turn = msgspec.structs.replace(session.turns[index], lost=lost)
        turns = (*session.turns[:index], turn, *session.turns[index + 1 :])
        session = msgspec.structs.replace(session, turns=turns)
        self.put(session)
        return session

    def _begins(self, turn: Under) -> None:
        self._under[turn.group] = turn
        for key in turn.asked:
            self._asking[key].append(turn)

    def over(self, turn: Under) -> None:
        """A turn is no longer under way. One that `took` did not record has no record."""
        if self._under.get(turn.group) is turn:
            del self._under[turn.group]
            for key in turn.asked:
                self._asking[key].remove(turn)
                if not self._asking[key]:
                    del self._asking[key]
        turn.over.set()

    def _named(self, caller: Caller, user: str) -> ClientSession | None:
        """A session of the tree that a request names: that with the id, or the root."""
        if caller.session:
            session = self._sessions.get(caller.session)
            if session is None or session.tenant != caller.key.tenant:
                raise HttpRefused(404, f"there is no session {caller.session[:80]!a}; POST /v1/sessions opens one")
            return session
        roots = self._found("name", caller.key.id, user, caller.name) if caller.name else []
        return next((root for root in roots if not self._closed(root)), None)

    def _repeated(
        self, scope: Scope, tree: ClientSession | None, asked: str, retry: str, caller: Caller
    ) -> Placed | None:
        """The place of a request that was sent before; None for a new one. HttpRefused with 409."""
        by, value = ("retry", retry) if retry else ("asked", asked)
        earlier: list[tuple[bool, RecordedTurn, Placed]] = []
        for turn in self._asking.get((scope, value), ()):
            earlier.append((turn.gone(), turn.record, Placed(turn.group, wait=turn)))
        for session in self._found(by, *scope, value):
            for index, recorded in enumerate(session.turns):
                if getattr(recorded, by) == value:
                    earlier.append((recorded.lost, recorded, Placed(session.group, recorded=index)))
        if tree is not None:
            earlier = [each for each in earlier if root_of(each[2].group) == root_of(tree.group)]
        elif caller.name:  # its tree has ended; a session without this name may have the same history
            earlier = [
                each for each in earlier if getattr(self._sessions.get(each[2].group), "named", "") == caller.name
            ]
        if retry and any(turn.asked != asked for _, turn, _ in earlier):
            raise HttpRefused(409, "this Idempotency-Key belongs to another request; send a new key")
        earlier = [each for each in earlier if each[0]] or (earlier if retry or caller.again else [])
        return earlier[-1][2] if earlier else None

    def _continued(
        self, scope: Scope, tree: ClientSession | None, heads: tuple[str, ...]
    ) -> tuple[ClientSession | None, int]:
        """The session that a history continues or branches off, and how many of its messages the record holds. (None,
        0): it begins a tree."""
        root = self._root(tree) if tree is not None else None
        for prefix in range(len(heads) - 1, 0, -1):
            owners = self._found("record", *scope, heads[prefix - 1])
            if root is not None:
                # A program's name may have had another tree, which ended: its conversations may go on here.
                root_id = root.group
                owners = [each for each in owners if root_of(each.group) == root_id or each.named == root.named != ""]
                if tree is not root and tree in owners:
                    return tree, prefix
            if len(owners) > 1:
                break
            if root is not None:
                owners = [each for each in owners if root_of(each.group) == root.group]
            if owners:
                ended = root is None and self._closed(self._root(owners[0]))
                return (None, 0) if ended else (owners[0], prefix)
        if root is None:
            return None, 0
        return next((each for each in self.tree(root.group) if self._free(each, "")), root), 0

    def _root(self, session: ClientSession) -> ClientSession:
        """The root of a session's tree. One without a turn is not stored: after a restart a branch replaces it."""
        group = root_of(session.group)
        if group not in self._sessions:
            self.put(msgspec.structs.replace(session, group=group, turns=(), untrainable="", ended=0.0, rated=False))
        return self._sessions[group]

    def _free(self, session: ClientSession, record: str) -> bool:
        """Whether a request with this record goes on with a session; otherwise it begins a branch."""
        newest = session.turns[-1].history if session.turns else ""
        return newest == record and session.group not in self._under and not self._closed(session)

    def _closed(self, session: ClientSession) -> bool:
        return bool(session.ended) or session.group in self._ending

    def _branch(self, session: ClientSession, policy: Callable[[str], PolicyRef]) -> ClientSession:
        """A new branch of a session's tree, of the tree's version."""
        root = self._root(session)
        group = f"{root.group}-{secrets.token_hex(4)}"
        session = msgspec.structs.replace(
            root,
            group=group,
            turns=(),
            policy=policy(group) if root.ended else root.policy,
            untrainable="",
            last_used=time.time(),
            ended=0.0,
            rated=False,
        )
        self.put(session)
        return session

    # Ends

    def ending(self, group: str) -> Under | None:
        """Let no further turn begin in a session; the turn under way, which comes first."""
        self._ending.add(group)
        return self._under.get(group)

    def ended(self, group: str, rated: bool) -> ClientSession | None:
        """A session is over: its last state. None where it was dropped meanwhile."""
        self._ending.discard(group)
        session = self._sessions.get(group)
        if session is not None:
            session = msgspec.structs.replace(session, ended=session.ended or time.time(), rated=session.rated or rated)
            self.put(session)
        return session

    def stays(self, group: str) -> None:
        """The end of a session failed: it is open again."""
        self._ending.discard(group)

    def idle(self, seconds: float) -> list[ClientSession]:
        """The open sessions of trees without a turn for this many seconds."""
        return [each for root in self._quiet(seconds) for each in self.tree(root) if not self._closed(each)]

    def expired(self, seconds: float) -> list[ClientSession]:
        """The sessions of trees that ended this many seconds ago."""
        before = time.time() - seconds
        trees = [self.tree(root) for root in self._quiet(seconds)]
        return [each for tree in trees if all(0 < other.ended <= before for other in tree) for each in tree]

    def _quiet(self, seconds: float) -> Iterator[str]:
        """The trees without a turn for this many seconds."""
        busy, before = {root_of(group) for group in self._under}, time.time() - seconds
        for root, used in self._trees.items():
            if used >= before:
                return
            if root not in busy:
                yield root


GONE = "the user's data was purged while this turn was sampled"


def merged(mine: ClientSession, theirs: ClientSession) -> ClientSession:
    """The state of a session that two gateways changed at once. One of them alone recorded each turn."""
    longer = mine if len(mine.turns) >= len(theirs.turns) else theirs
    return msgspec.structs.replace(
        longer,
        training_allowed=mine.training_allowed and theirs.training_allowed,
        untrainable=mine.untrainable or theirs.untrainable,
        last_used=max(mine.last_used, theirs.last_used),
        ended=mine.ended or theirs.ended,
        rated=mine.rated or theirs.rated,
    )


def _keys(session: ClientSession, known: int = 0) -> Iterator[tuple[str, ...]]:
    """The keys by which a session is found. known: its first turns that the index has already."""
    scope, root = _scope(session), root_of(session.group)
    yield "user", scope.user
    yield "tree", root
    if session.named and session.group == root:
        yield "name", *scope, session.named
    for turn in session.turns[known:]:
        yield "record", *scope, turn.history
        yield "asked", *scope, turn.asked
        if turn.retry:
            yield "retry", *scope, turn.retry


def _scope(session: ClientSession) -> Scope:
    return Scope(session.key, user_of(session.group))


def _untrainable(session: ClientSession, turn: Under) -> str:
    """Why the turns of a session cannot be trained on together; empty when they can."""
    if turn.temperature <= 0.0:
        return "sampled greedily, which has no log-probabilities to train on"
    if session.turns and turn.temperature != session.temperature:
        return f"its turns were sampled at temperatures {session.temperature:g} and {turn.temperature:g}"
    return "a grammar chose among its tokens" if turn.formatted else ""


def asked_by(trajectory: Trajectory) -> RolloutRequest:
    """The request of a finished session that an earlier gateway opened."""
    names = ("run", "lane", "group", "slot", "attempt", "task", "seed", "policy")
    return RolloutRequest(**{name: getattr(trajectory, name) for name in names})


def attempt_record(run: str, group: str, task: TaskRef, seed: int, attempt: int) -> SlotIssued:
    """The ledger record of an attempt: a session is a group with one slot."""
    return SlotIssued(
        run=run,
        lane="production",
        group=group,
        index=0,
        slot=0,
        attempt=attempt,
        group_size=1,
        task=task,
        seed=seed,
        min_version=0,
    )
