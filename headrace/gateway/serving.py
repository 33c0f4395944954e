"""Turns for agents that run their own tools: sends each request to a rollout actor of the production lane.

The gateway stores the sessions and handles no tokens; the rollout actor handles the tokens and stores no sessions. A
session is a record in HR_SESSION, so a restarted gateway continues it. It ends when it is rated, closed, or idle for
``[production] idle_s`` seconds: then its turns become a Trajectory of the production lane. Only rated trajectories can
be used for training.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, BusTimeout, NoResponders
from headrace.config import Config
from headrace.gateway.client_sessions import ClientSessions
from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.endpoints import LATEST, Begun, Caller, Parts
from headrace.gateway.http import HttpRefused
from headrace.gateway.requests import NewRating
from headrace.gateway.shadows import Shadows
from headrace.gateway.signals.ratings import Ratings
from headrace.gateway.split import Split
from headrace.gateway.tenants.keys import ApiKey
from headrace.gateway.traffic import TrafficReports
from headrace.gateway.user_keys import UserKeys
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.product import (
    CLIENT_SUITE,
    TURN_S,
    AttemptControl,
    ClientMessage,
    ClientSession,
    ClientSessionEnd,
    ClientTurn,
    ClientTurnDone,
    ClientTurnPart,
    Feedback,
)
from headrace.messages.rollout import Capture, Sampling, Trajectory
from headrace.messages.tasks import TaskRef

CUT_AFTER_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds that a turn gets to end before it is asked for again."""
Tell = Callable[..., Awaitable[None]]
"""`Actor.event`."""


class ClientServing:
    """The sampler behind the gateway's endpoints."""

    def __init__(
        self,
        bus: Bus,
        config: Config,
        run: str,
        users: UserKeys,
        split: Split,
        event: Tell,
        ratings: Ratings,
        traffic: TrafficReports,
    ) -> None:
        self._bus, self._config, self._run, self._ratings = bus, config, run, ratings
        self._users, self._split, self._event, self._traffic = users, split, event, traffic
        self._shadows = Shadows(bus, run, self._ask)
        self._sessions = ClientSessions()
        self._locks: dict[str, asyncio.Lock] = {}

    async def start(self) -> None:
        """Load the sessions that an earlier gateway stored."""
        self._state = await self._bus.kv("HR_SESSION")
        entries = await self._state.items(self._key("*", "*"))
        # A session under another key than its own could never be deleted, and would be ended again and again.
        self._sessions = ClientSessions(
            [
                entry
                for key, (entry, _) in entries.items()
                if isinstance(entry, ClientSession) and key == self._key_of(entry.group)
            ]
        )

    def _key(self, user: str, session: str) -> str:
        return f"{self._run}.session.client.{user}.{session}"

    def _key_of(self, group: str) -> str:
        user, _, session = group.partition(".")
        return self._key(user, session)

    def models(self) -> list[str]:
        """See `Sampler.models`."""
        return [LATEST]

    @property
    def turns(self) -> Mapping[str, int]:
        """Turns since the start by the way in which they came to their session."""
        return self._sessions.turns

    def begin(self, request: ModelRequest, caller: Caller) -> Begun:
        """See `Sampler.begin`."""
        user = self._users.hash(caller.key.tenant, caller.user or f"key {caller.key.id}")
        request = msgspec.structs.replace(request, session=caller.session)
        session = self._sessions.place(request, caller.key.tenant, user, caller.key.training, self._split.policy)
        parts: Parts = asyncio.Queue()
        return Begun(session.group, self._sample(request, session.group, parts), parts)

    async def _sample(self, request: ModelRequest, group: str, parts: Parts) -> ModelReply:
        """One turn of a session at a time, because the turn before this one changes its history."""
        production = self._config.production
        async with self._locks.setdefault(group, asyncio.Lock()):
            session, prefix = self._sessions.go_on(group, request)
            sampling = Sampling(
                temperature=request.temperature,
                max_turn_tokens=min(request.max_tokens or production.turn_tokens, production.turn_tokens),
            )
            turn = ClientTurn(
                run=self._run,
                group=session.group,
                segment=session.segment,
                messages=request.messages,
                known=prefix,
                tools=request.tools,
                parallel=request.parallel,
                policy=session.policy,
                sampling=sampling,
                seed=secrets.randbits(31),
                context_tokens=production.context_tokens,
                stream=request.stream,
            )
            with self._traffic.turn():
                done = await self._ask(turn, parts)
            if done.begin_segment:
                session = self._sessions.begin_segment(group, done.begin_segment)
                turn = msgspec.structs.replace(turn, segment=session.segment, known=0)
                with self._traffic.turn():
                    done = await self._ask(turn, parts)
                if done.begin_segment:
                    raise HttpRefused(503, done.failed, 5.0)
            if self._split.shadow is not None:
                self._shadows.mirror(msgspec.structs.replace(turn, stream=False), self._split.shadow)
            message = ClientMessage(role="assistant", text=done.said, calls=done.calls)
            await self._keep(self._sessions.took(session, request, message))
        return ModelReply(
            id=secrets.token_hex(12),
            model=request.model or LATEST,
            created=int(time.time()),
            session=session.group,
            thinking=done.thinking,
            text=done.text,
            calls=done.calls,
            after=done.after,
            stop=done.stop,
            usage=done.usage,
        )

    async def count(self, request: ModelRequest) -> int:
        """See `Sampler.count`."""
        turn = ClientTurn(
            run=self._run,
            group=".",
            segment=0,
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
            if answer.failed and not answer.begin_segment:
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

    async def _keep(self, session: ClientSession) -> None:
        await self._state.put(self._key_of(session.group), session)

    async def rate(self, session: str, key: ApiKey, rating: NewRating) -> None:
        """See `Sampler.rate`."""
        record = self._sessions.get(session)
        if record is not None and record.tenant == key.tenant:
            trajectory = await self._end(record)
            if not trajectory:
                raise HttpRefused(409, "no turn of this session was sampled, so there is nothing to rate")
            capture = Capture(training_allowed=record.training_allowed, untrainable=record.untrainable)
        else:
            trajectory, capture = await self._ended(session, key)
        feedback = Feedback(
            tenant=key.tenant,
            user=session.partition(".")[0],
            run=self._run,
            trajectory=trajectory,
            thumb=rating.given,
            signal=rating.signal,
            reward=rating.reward,
            training_allowed=capture.training_allowed and key.training,
            comment=rating.comment,
            untrainable=capture.untrainable,
        )
        await self._ratings.publish(feedback)

    async def _ended(self, session: str, key: ApiKey) -> tuple[str, Capture]:
        """The record of a session that has ended. A later rating is no error: the feedback actor decides whether it is
        late. HttpRefused with 404; BusError."""
        try:
            last = await self._bus.last("HR_TRAJ", subjects.TRAJ.at(run=self._run, group=session))
        except ValueError:  # the name is no session's
            last = None
        record = last.message if last is not None else None
        if not isinstance(record, Trajectory) or record.task != TaskRef(CLIENT_SUITE, key.tenant):
            raise HttpRefused(404, "there is no such session with a turn")
        return record.id, record.capture or Capture(training_allowed=False)

    async def close(self, session: str, key: ApiKey) -> None:
        """See `Sampler.close`."""
        await self._end(self._owned(session, key))

    def _owned(self, group: str, key: ApiKey) -> ClientSession:
        session = self._sessions.get(group)
        if session is None or session.tenant != key.tenant:
            raise HttpRefused(404, "there is no such open session")
        return session

    async def _end(self, session: ClientSession) -> str:
        """End a session; return the id of its Trajectory, empty if no turn was sampled. HttpRefused with 503."""
        group = session.group
        async with self._locks.setdefault(group, asyncio.Lock()):
            end = ClientSessionEnd(
                run=self._run,
                group=group,
                tenant=session.tenant,
                training_allowed=session.training_allowed,
                policy=session.policy,
                sampling=Sampling(temperature=session.temperature),
                untrainable=session.untrainable,
            )
            subject = subjects.RPC.at(service="rollout", caller="gateway", method=f"end-{subjects.token(self._run)}")
            try:
                answer = await self._bus.request(subject, end, timeout=30.0)
            except BusError as error:
                raise HttpRefused(503, f"the session could not be ended: {error}", 5.0) from None
            if not isinstance(answer, Ack) or not answer.ok:
                raise HttpRefused(503, f"the session could not be ended: {getattr(answer, 'detail', answer)}", 5.0)
            await self._state.delete(self._key_of(group))
            self._sessions.close(group)
        self._locks.pop(group, None)
        await self._event("client_session_ended", group, rewrites=session.rewrites, segments=session.segment + 1)
        return answer.detail

    async def end_idle(self) -> None:
        """End the sessions without a request for ``[production] idle_s``."""
        for session in self._sessions.idle(self._config.production.idle_s):
            try:
                await self._end(session)
            except HttpRefused as error:
                await self._event("client_session_open", str(error), "warning", session=session.group)
                return

    async def forget(self, user: str) -> None:
        """Remove the open sessions of a user, without a Trajectory."""
        for session in self._sessions.of_user(user):
            await self._state.delete(self._key_of(session.group))
            self._sessions.close(session.group)
            self._locks.pop(session.group, None)
