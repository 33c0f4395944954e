"""Turns for agents that run their own tools: sends each request to a rollout actor of the production lane.

The gateway stores the sessions and handles no tokens; the rollout actor handles the tokens and stores no sessions. A
session is a record in HR_SESSION, which all gateways of the run change by compare-and-set, so any of them continues it.
A gateway keeps what others store as it came, and decodes a user's sessions when the user asks for something. A session
ends when it is rated, closed, or idle for ``[production] idle_s`` seconds: then its turns become a Trajectory of the
production lane, and the record stays for as long again. Only rated trajectories can be used for training.
"""

import asyncio
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from headrace.bus.errors import BusError, BusTimeout, NoResponders, WrongSequence
from headrace.bus.nats.ordered_reader import Stored
from headrace.gateway.agents.store import GatewayParts
from headrace.gateway.conversation import ModelReply, ModelRequest, reply_id
from headrace.gateway.endpoints import LATEST, Begun, Parts
from headrace.gateway.http import HttpRefused
from headrace.gateway.requests import NewRating
from headrace.gateway.sessions import Caller, Under, merged, root_of, user_of
from headrace.gateway.shadows import Shadows
from headrace.gateway.signals.ratings import Ratings
from headrace.gateway.traffic import TrafficReports
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.product import (
    CLIENT_SUITE,
    TURN_S,
    ApiKey,
    AttemptControl,
    ClientMessage,
    ClientSession,
    ClientSessionEnd,
    ClientTurn,
    ClientTurnDone,
    ClientTurnPart,
    Feedback,
    RecordedTurn,
    TurnPlace,
    results_in_order,
)
from headrace.messages.rollout import Capture, Sampling, Trajectory

CUT_AFTER_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds that a turn gets to end before it is asked for again."""
ID = re.compile(r"[0-9a-f]{20}\.[0-9a-f]{12}(-[0-9a-f]{8})?")
"""A session's id."""
CATCH_UP_S = 5.0
"""The longest wait for what other gateways stored."""
WRITES = 5
"""Attempts to store a session that other gateways change at the same time."""
AS_ASKED = ("messages", "tools", "parallel", "forced", "stops", "answer", "logprobs", "tokens")
"""The fields that a ClientTurn has from its request."""


class ClientServing:
    """The sampler behind the gateway's endpoints."""

    def __init__(self, parts: GatewayParts, ratings: Ratings, traffic: TrafficReports) -> None:
        self._bus, self._config, self._run, self._users = parts.bus, parts.config, parts.run, parts.users
        self._split, self._event, self._ratings, self._traffic = parts.split, parts.event, ratings, traffic
        self._shadows = Shadows(parts.bus, parts.run, self._ask)
        self._sessions = parts.sessions
        self._revisions: dict[str, int] = {}
        """Of the stored sessions, as this gateway last read or wrote them."""
        self._storing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._closing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._unread = defaultdict[str, dict[str, Stored]](dict)
        """The changes that are not decoded yet, by user and session."""
        self._seen, self._news = 0, asyncio.Event()

    async def start(self) -> None:
        """Load the sessions that gateways stored."""
        self._state = await self._bus.kv("HR_SESSION")
        self._seen = await self._state.newest(f"{self._run}.session.>")
        for key, (entry, revision) in (await self._state.items(self._key("*", "*"))).items():
            self._apply(key, entry, revision)

    async def follow(self, others: Callable[[str, Message | None, int], None]) -> None:
        """Hear what gateways store. others: takes what is no session of a client."""
        async for change in self._state.changes(f"{self._run}.session.>", self._seen):
            key = self._state.key(change)
            if not key.startswith(self._key("", "")[:-1]):
                if (value := await self._state.value(change)) is not None:
                    others(key, *value)
            elif change.seq > self._revisions.get(group := _group_of(key), 0):
                self._unread[user_of(group)][group] = change
            self._seen = change.seq
            self._news.set()

    def _apply(self, key: str, entry: Message | None, revision: int) -> None:
        group = _group_of(key)
        if entry is None:
            self._drop(group)
        # A session under another key than its own could never be deleted, and would be ended again and again.
        elif isinstance(entry, ClientSession) and key == self._key_of(entry.group):
            if revision > self._revisions.get(group, 0):
                self._revisions[group] = revision
                self._sessions.put(entry)

    async def _read(self, user: str, before: float = math.inf) -> None:
        """Decode the sessions of a user that other gateways stored before a time. BusError."""
        unread = self._unread.get(user, {})
        for group, change in [*unread.items()]:
            # A write of this gateway that is under way reads what came before it, or tells its revision.
            if change.time < before and not self._storing[group].locked() and unread.pop(group, None) is not None:
                if change.seq > self._revisions.get(group, 0):
                    if (value := await self._state.value(change)) is not None:
                        self._apply(self._key_of(group), *value)
        if not unread:
            self._unread.pop(user, None)

    async def caught_up(self, user: str = "") -> None:
        """Wait for everything that gateways stored before now. user: whose sessions are read. HttpRefused with 503."""
        newest = await self._state.newest(f"{self._run}.session.>")
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self._seen < newest:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise HttpRefused(
                503, "this gateway does not hear what others store; send the request again", 1.0
            ) from None
        await self._read(user)

    def _drop(self, group: str) -> None:
        self._sessions.drop(group)
        for held in (self._revisions, self._storing, self._closing):
            held.pop(group, None)

    def _key(self, user: str, session: str) -> str:
        return f"{self._run}.session.client.{user}.{session}"

    def _key_of(self, group: str) -> str:
        user, _, session = group.partition(".")
        return self._key(user, session)

    def _user(self, caller: Caller) -> str:
        return self._users.hash(caller.key.tenant, caller.user or f"key {caller.key.id}")

    async def open(self, caller: Caller, labels: dict[str, str]) -> ClientSession:
        """See `Sampler.open`."""
        session = self._sessions.open(caller, self._user(caller), self._split.policy, labels)
        await self._keep(session.group)
        return session

    async def begin(self, request: ModelRequest, caller: Caller) -> Begun:
        """See `Sampler.begin`."""
        user = self._user(caller)
        await self._read(user)
        request = await self._recalled(request, caller)
        if request.previous is not None:
            await self._has(request.previous, caller.key)
        if caller.session:
            await self._known(caller.session, caller.key)
        placed = self._sessions.place(request, caller, user, self._split.policy, sure=False)
        while placed is None or placed.wait is not None:
            await (placed.wait.over.wait() if placed is not None and placed.wait is not None else self.caught_up(user))
            placed = self._sessions.place(request, caller, user, self._split.policy)
        if placed.turn is None:
            again = self._again(request, placed.group, placed.recorded)
            return Begun(lambda: (placed.group, placed.recorded), again, asyncio.Queue())
        parts, turn = Parts(), placed.turn
        task = asyncio.create_task(self._sample(request, turn, placed.known, parts))
        task.add_done_callback(lambda _: self._sessions.over(turn))  # also of a task that was cancelled before it ran
        return Begun(lambda: (turn.group, turn.index), task, parts, self._most(request))

    async def _recalled(self, request: ModelRequest, caller: Caller) -> ModelRequest:
        """The request with the messages that it names by the ids of items; a client may name some items of a turn and
        send others. HttpRefused."""
        if not request.recalled:
            return request
        messages = [*request.messages]
        for at, (place, items) in request.recalled.items():
            if not await self._has(place, caller.key):
                raise HttpRefused(404, "the record of an item is gone: send the item itself")
            asked = msgspec.structs.replace(request, messages=(), stream=False)
            reply = await self._again(asked, place.group, place.index)
            sent, order = messages[at], [call.id for call in reply.calls]
            texts = (reply.text if "msg" in items else "", sent.text, reply.after if "msg_after" in items else "")
            named = (call for at, call in enumerate(reply.calls) if {f"fc_{at}", f"ctc_{at}"} & items)
            calls = sorted((*named, *sent.calls), key=lambda call: [*order, call.id].index(call.id))
            messages[at] = ClientMessage(role="assistant", text="\n".join(filter(None, texts)), calls=tuple(calls))
        return msgspec.structs.replace(request, messages=results_in_order(messages), recalled={})

    def _most(self, request: ModelRequest) -> int:
        """Tokens that a turn may sample."""
        limit = self._config.production.limits.max_turn_tokens
        return min(request.max_tokens or limit, limit)

    def _turn(self, request: ModelRequest, group: str, known: int = 0, recorded: int = -1) -> ClientTurn:
        limits = self._config.production.limits
        session = self._sessions.get(group)
        return ClientTurn(
            run=self._run,
            group=group,
            known=known,
            policy=session.policy if session is not None else self._split.promoted,
            sampling=Sampling(
                temperature=request.temperature,
                max_turn_tokens=self._most(request),
            ),
            seed=secrets.randbits(31),
            context_tokens=limits.context_tokens,
            recorded=recorded,
            stream=request.stream and recorded < 0,
            behind=request.previous,
            **{name: getattr(request, name) for name in AS_ASKED},
        )

    async def _sample(self, request: ModelRequest, turn: Under, known: int, parts: Parts) -> ModelReply:
        """A new turn. Nothing else of its session is sampled meanwhile."""
        try:
            asked = self._turn(request, turn.group, known)
            with self._traffic.turn():
                done = await self._ask(asked, parts)
            if done.behind:
                self._sessions.branch(turn, self._split.policy)
                asked = self._turn(request, turn.group)
                with self._traffic.turn():
                    done = await self._ask(asked, parts)
                if done.behind:
                    raise HttpRefused(503, done.failed, 5.0)
            if self._split.shadow is not None:
                self._shadows.mirror(msgspec.structs.replace(asked, stream=False), self._split.shadow)
            message = ClientMessage(role="assistant", text=done.said, calls=done.calls)
            session = self._sessions.took(turn, message)
        finally:
            self._sessions.over(turn)
        reply = reply_of(request, done, session.group, len(session.turns) - 1)
        try:
            await self._keep(session.group)
        except BusError:
            self._sessions.answered(session.group, reply.turn, lost=True)
            raise
        return reply

    async def _again(self, request: ModelRequest, group: str, index: int) -> ModelReply:
        """A recorded turn."""
        done = await self._ask(self._turn(request, group, recorded=index))
        return reply_of(request, done, group, index)

    async def answered(self, reply: ModelReply, lost: bool) -> None:
        """See `Sampler.answered`."""
        if self._sessions.answered(reply.session, reply.turn, lost) is not None:
            await self._keep(reply.session)

    async def count(self, request: ModelRequest) -> int:
        """See `Sampler.count`."""
        turn = ClientTurn(
            run=self._run,
            group=".",
            messages=request.messages,
            tools=request.tools,
            policy=self._split.promoted,
            count_only=True,
        )
        return (await self._ask(turn)).usage.prompt

    async def _ask(self, turn: ClientTurn, parts: Parts | None = None) -> ClientTurnDone:
        """Request a turn from a rollout actor. When this is cancelled, the turn is cut. HttpRefused with 400, 500, 503
        or 504."""
        subject = subjects.RPC.at(service="rollout", caller="gateway", method=f"turn-{subjects.token(self._run)}")
        turn = msgspec.structs.replace(turn, id=secrets.token_hex(8))

        def hear(message: Message) -> None:
            if parts is not None and isinstance(message, ClientTurnPart):
                parts.put_nowait(message)

        try:
            owner = turn.group.partition(".")[0]
            asking = asyncio.ensure_future(self._bus.request(subject, turn, timeout=TURN_S, owner=owner, on_part=hear))
            try:
                answer = await asyncio.shield(asking)
            except (asyncio.CancelledError, BusTimeout):
                await self._cut(turn.id, asking)
                raise
        except NoResponders:
            raise HttpRefused(503, "no rollout actor serves the production lane now", 5.0) from None
        except BusTimeout:
            raise HttpRefused(504, f"no turn within {TURN_S:g} s", 5.0) from None
        except BusError as error:
            raise HttpRefused(503, str(error), 5.0) from None
        if isinstance(answer, ClientTurnDone):
            if answer.refused:
                raise HttpRefused(400, answer.refused)
            if answer.failed and not answer.behind:
                raise HttpRefused(503, answer.failed, 5.0)
            return answer
        raise HttpRefused(500, answer.detail if isinstance(answer, Ack) else f"unexpected answer {answer.type_name}")

    async def _cut(self, turn: str, asking: "asyncio.Future[Message]") -> None:
        """End a turn at its engine; return when it has ended, or after the last of `CUT_AFTER_S`."""
        control = subjects.RPC.at(service="rollout", caller="gateway", method=f"control-{subjects.token(self._run)}")
        for after_s in CUT_AFTER_S:
            with suppress(BusError):
                await self._bus.emit(control, AttemptControl(run=self._run, turn=turn))
            if (await asyncio.wait({asking}, timeout=after_s))[0]:
                break
        asking.cancel()
        with suppress(asyncio.CancelledError, BusError):
            await asking

    async def _keep(self, group: str) -> None:
        """Store a session. Where another gateway changed it at once, both changes count. BusError."""
        async with self._storing[group]:
            for _ in range(WRITES):
                session, key = self._sessions.get(group), self._key_of(group)
                if session is None:
                    return
                try:
                    revision = self._revisions.get(group)
                    write = (
                        self._state.create(key, session) if not revision else self._state.update(key, session, revision)
                    )
                    self._revisions[group] = await write
                    return
                except WrongSequence:
                    stored = await self._state.get(key)
                if stored is None or not isinstance(stored[0], ClientSession):
                    self._sessions.drop(group)  # its user is purged
                    return
                self._revisions[group] = stored[1]
                self._sessions.put(merged(session, stored[0]))
            raise BusError(f"other gateways changed the session {group} at the same time, {WRITES} times")

    async def rate(self, id: str, key: ApiKey, rating: NewRating) -> dict[str, str]:
        """See `Sampler.rate`."""
        session = await self._known(id, key)
        tree = [each for each in self._sessions.tree(id) if not each.rated] if id == root_of(id) else []
        outcomes: list[dict[str, str]] = []
        for each in [*(each for each in tree if each.group != id), session]:  # the tree is whole with its first session
            if await self._end(each, rated=each.group == id != root_of(id)):
                outcomes.append(await self._publish(self._sessions.get(each.group) or each, key, rating))
        if not outcomes:
            raise HttpRefused(409, "no turn of this session was sampled, so there is nothing to rate")
        return outcomes[-1]

    async def _publish(self, session: ClientSession, key: ApiKey, rating: NewRating) -> dict[str, str]:
        feedback = Feedback(
            tenant=key.tenant,
            user=user_of(session.group),
            run=self._run,
            trajectory=f"{session.group}-0-0",
            thumb=rating.given,
            signal=rating.signal,
            reward=rating.reward,
            training_allowed=session.training_allowed and key.training,
            comment=rating.comment,
            untrainable=session.untrainable,
        )
        return await self._ratings.publish(feedback)

    async def _has(self, place: TurnPlace, key: ApiKey) -> bool:
        """Whether a turn is recorded; another gateway may have stored it a moment ago. HttpRefused with 404."""
        if place.index >= len((await self._known(place.group, key)).turns):
            await self.caught_up(user_of(place.group))
        return place.index < len((await self._known(place.group, key)).turns)

    async def _known(self, id: str, key: ApiKey) -> ClientSession:
        """A session of the key's tenant: open, remembered, or long ended and in HR_TRAJ. HttpRefused with 404;
        BusError."""
        await self._read(user_of(id))
        session = self._sessions.get(id)
        if session is None and ID.fullmatch(id):
            await self.caught_up(user_of(id))
            session = self._sessions.get(id)
        if session is None and ID.fullmatch(id):
            last = await self._bus.last("HR_TRAJ", subjects.TRAJ.at(run=self._run, group=id))
            if last is not None and isinstance(record := last.message, Trajectory):
                capture = record.capture or Capture(training_allowed=False)
                session = ClientSession(
                    group=id,
                    turns=(RecordedTurn(history="", asked=""),) * len(record.turns),  # their digests are gone
                    tenant=record.task.task if record.task.suite == CLIENT_SUITE else "",
                    key=key.id,
                    training_allowed=capture.training_allowed,
                    policy=record.policy,
                    untrainable=capture.untrainable,
                    labels=capture.labels,
                    ended=last.time,
                    last_used=time.time(),
                )
        if session is None or session.tenant != key.tenant:
            raise HttpRefused(404, f"there is no session {id[:80]!a}; POST /v1/sessions opens one")
        if self._sessions.get(id) is None:
            self._sessions.put(session)
        return session

    async def view(self, id: str, key: ApiKey) -> dict[str, Any]:
        """See `Sampler.view`."""
        session = await self._known(id, key)
        return {
            "session": id,
            "state": "ended" if session.ended else "sampling" if self._sessions.sampling(id) else "open",
            "turns": len(session.turns),
            "branches": [each.group for each in self._sessions.tree(id) if id == root_of(id) != each.group],
            "untrainable": session.untrainable,
            "labels": session.labels,
            **({"rating": await self._ratings.fate(f"{id}-0-0")} if session.ended else {}),
        }

    async def close(self, id: str, key: ApiKey) -> None:
        """See `Sampler.close`."""
        session = await self._known(id, key)
        for each in self._sessions.tree(id) if id == root_of(id) else [session]:
            await self._end(each)

    async def _end(self, session: ClientSession, rated: bool = False) -> bool:
        """End a session after its turn under way; whether it has a Trajectory. One that has ended stays as it is.
        HttpRefused with 503."""
        group = session.group
        async with self._closing[group]:
            session = self._sessions.get(group) or session
            ended = bool(session.turns) if session.ended else await self._ended(group)
            last = self._sessions.ended(group, rated)
            if last is not None and (not session.ended or rated != session.rated):
                await self._keep(group)
        return ended

    async def _ended(self, group: str) -> bool:
        """Let the rollout actor end an open session. HttpRefused with 503."""
        try:
            if (turn := self._sessions.ending(group)) is not None:
                await turn.over.wait()
            session = self._sessions.get(group)
            if session is None:
                raise HttpRefused(404, "the session's user is purged")
            end = ClientSessionEnd(
                run=self._run,
                group=group,
                tenant=session.tenant,
                training_allowed=session.training_allowed,
                policy=session.policy,
                sampling=Sampling(temperature=session.temperature),
                untrainable=session.untrainable,
                labels=session.labels,
            )
            subject = subjects.RPC.at(service="rollout", caller="gateway", method=f"end-{subjects.token(self._run)}")
            try:
                answer = await self._bus.request(subject, end, timeout=30.0)
            except BusError as error:
                raise HttpRefused(503, f"the session could not be ended: {error}", 5.0) from None
            if not isinstance(answer, Ack) or not answer.ok:
                raise HttpRefused(503, f"the session could not be ended: {getattr(answer, 'detail', answer)}", 5.0)
        except BaseException:
            self._sessions.stays(group)
            raise
        await self._event("client_session_ended", group, turns=len(session.turns))
        return answer.detail == f"{group}-0-0"

    async def end_idle(self) -> None:
        """End the sessions without a request for ``[production] idle_s``, and forget those that ended long ago. The
        gateway of a session may be gone."""
        for user in [*self._unread]:
            await self._read(user, before=time.time() - self._config.production.idle_s)
        for session in self._sessions.idle(self._config.production.idle_s):
            try:
                await self._end(session)
            except HttpRefused as error:
                await self._event("client_session_open", str(error), "warning", session=session.group)
                return
        for session in self._sessions.expired(self._config.production.idle_s):
            await self._state.delete(self._key_of(session.group))
            self._drop(session.group)

    async def forget(self, user: str) -> None:
        """Remove the sessions of a user, without a Trajectory."""
        await self._read(user)
        for session in self._sessions.of_user(user):
            await self._state.delete(self._key_of(session.group))
            self._drop(session.group)


def _group_of(key: str) -> str:
    return ".".join(key.split(".")[-2:])


def reply_of(request: ModelRequest, done: ClientTurnDone, group: str, turn: int) -> ModelReply:
    """The reply that is made of a turn. group, turn: its place."""
    return ModelReply(
        id=reply_id(group, turn),
        model=request.model or LATEST,
        created=int(time.time()),
        session=group,
        turn=turn,
        **msgspec.structs.asdict(done),
    )
