"""The model calls of one attempt: placed by the gateway's sessions, sampled by the attempt's engine, recorded as its
turns.

A request is sampled as the attempt's request says, whatever the harness asks: its temperature, and a seed per turn. A
limit of the attempt ends it: further requests are answered with 403, which no client repeats, and the harness has a
moment to end by itself.
"""

import asyncio
import math
import secrets
import time

import msgspec

from headrace.actors.rollout.client_turns import ClientTurns, Record, Serve
from headrace.actors.rollout.harnesses.record import AttemptRecord
from headrace.bus.connection import Bus
from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.endpoints import Begun, Parts
from headrace.gateway.http import HttpRefused
from headrace.gateway.serving import reply_of
from headrace.gateway.sessions import Caller, Sessions, Under
from headrace.gateway.tenants.keys import digest_of
from headrace.harness.loop import Outcome
from headrace.messages.product import ApiKey, ClientMessage, ClientTurn, ClientTurnDone, ClientTurnPart
from headrace.messages.rollout import PolicyRef, RolloutRequest

_GOLDEN = 0x9E3779B97F4A7C15
USER = "0" * 20
"""Stands for the user in the ids of sessions, which no bus sees."""
ASKED = ("messages", "tools", "parallel", "forced", "stops", "logprobs")
"""The fields that a turn has from its request."""


class _Turns(ClientTurns):
    """Samples the turns of one attempt."""

    def __init__(
        self, bus: Bus, request: RolloutRequest, record: AttemptRecord, serve: Serve, parts: dict[str, Parts]
    ) -> None:
        super().__init__(bus, "", serve, (), idle_s=math.inf)
        self.lane, self._attempt, self._told = request.lane, record, parts

    def _record(self, run: str, group: str) -> Record:
        return self._attempt.of(group)

    async def _say(self, turn: str, part: ClientTurnPart) -> None:
        self._told[turn].put_nowait(part)

    async def close(self) -> None:
        """Forget every conversation, in the engine too."""
        for group in list(self._sessions):
            await self._drop(group)


class Conversations:
    """The model calls of one harness, and their answers."""

    def __init__(self, bus: Bus, request: RolloutRequest, record: AttemptRecord, serve: Serve) -> None:
        """serve: opens the engine and format of a policy."""
        self._request, self._record = request, record
        self._sessions = Sessions()
        self._parts: dict[str, Parts] = {}
        self._turns = _Turns(bus, request, record, serve, self._parts)
        self.key = secrets.token_urlsafe(24)
        digest = digest_of(self.key)
        self.api_key = ApiKey(
            id=digest[:8],
            digest=digest,
            tenant=request.trajectory,
            requests_per_minute=1 << 30,
            scopes=("turns",),
            created=time.time(),
        )
        self.requests = self.rewritten = 0
        self.limit: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """The limit of the attempt that was reached."""
        self.fault: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the endpoint failed."""
        self.full = False
        """Whether the last request was longer than the context."""

    async def close(self) -> None:
        """Forget every conversation."""
        await self._turns.close()

    def _policy(self, group: str) -> PolicyRef:
        return self._request.policy

    async def begin(self, request: ModelRequest, caller: Caller) -> Begun:
        """`Sampler.begin`."""
        self.requests += 1
        if request.recalled:
            raise HttpRefused(400, "expected the items themselves: this endpoint stores none for their ids")
        if request.answer:  # a grammar would choose among the policy's tokens
            request = msgspec.structs.replace(request, answer="", left_out=(*request.left_out, "response_format"))
        while (placed := self._sessions.place(request, caller, USER, self._policy)) is None or placed.wait is not None:
            assert placed is not None and placed.wait is not None
            await placed.wait.over.wait()
        if placed.turn is None:
            again = self._again(request, placed.group, placed.recorded)
            return Begun(lambda: (placed.group, placed.recorded), again, asyncio.Queue())
        turn, parts = placed.turn, Parts()
        if not placed.known and any(message.role == "assistant" for message in request.messages):
            self.rewritten += 1
        try:
            self._limit()
        except HttpRefused:
            self._sessions.over(turn)
            raise
        task = asyncio.create_task(self._sample(request, turn, placed.known, parts))
        task.add_done_callback(lambda _: self._sessions.over(turn))
        return Begun(lambda: (turn.group, turn.index), task, parts)

    def _limit(self) -> None:
        """HttpRefused once the attempt has reached a limit."""
        limits = self._request.limits
        if not self.limit.done() and len(self._record.turns) >= limits.max_turns:
            self.limit.set_result("max_turns")
        elif not self.limit.done() and self._record.tokens >= limits.max_tokens:
            self.limit.set_result("max_tokens")
        if self.limit.done():
            raise HttpRefused(403, f"the attempt has reached its limit: {self.limit.result()}")

    def _turn(self, request: ModelRequest, group: str, known: int = 0, recorded: int = -1) -> ClientTurn:
        asked, turns = self._request, len(self._record.turns)
        most = min(asked.sampling.max_turn_tokens, asked.limits.max_tokens - self._record.tokens)
        return ClientTurn(
            run=asked.run,
            group=group,
            known=known,
            policy=asked.policy,
            sampling=msgspec.structs.replace(
                asked.sampling, max_turn_tokens=max(1, min(request.max_tokens or most, most))
            ),
            seed=(asked.seed + turns * _GOLDEN) % (1 << 63),
            context_tokens=asked.limits.context_tokens,
            recorded=recorded,
            stream=request.stream and recorded < 0,
            behind=request.previous,
            id=secrets.token_hex(8),
            **{name: getattr(request, name) for name in ASKED},
        )

    async def _sample(self, request: ModelRequest, turn: Under, known: int, parts: Parts) -> ModelReply:
        try:
            done = await self._ask(self._turn(request, turn.group, known), parts)
            if done.behind:
                self._sessions.branch(turn, self._policy)
                done = await self._ask(self._turn(request, turn.group), parts)
            session = self._sessions.took(turn, ClientMessage(role="assistant", text=done.said, calls=done.calls))
        finally:
            self._sessions.over(turn)
        return reply_of(request, done, session.group, len(session.turns) - 1)

    async def _again(self, request: ModelRequest, group: str, index: int) -> ModelReply:
        return reply_of(request, await self._ask(self._turn(request, group, recorded=index)), group, index)

    async def _ask(self, turn: ClientTurn, parts: Parts | None = None) -> ClientTurnDone:
        """A turn. When this is cancelled, the turn is cut. HttpRefused."""
        self._parts[turn.id] = parts or Parts()
        asking = asyncio.ensure_future(self._turns.turn(turn))
        try:
            done = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._turns.cut(turn.id)
            await asyncio.wait({asking})
            raise
        except Exception as error:  # of this process or the broker: the harness did nothing wrong
            self._failed(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._parts.pop(turn.id, None)
        self.full = done.full
        if done.refused:
            raise HttpRefused(400, done.refused)
        if done.failed and not done.behind:
            self._failed(done.failed)
            raise HttpRefused(503, done.failed, 5.0)
        return done

    def _failed(self, why: str) -> None:
        if not self.fault.done():
            self.fault.set_result(why)

    async def answered(self, reply: ModelReply, lost: bool) -> None:
        """`Sampler.answered`."""
        self._sessions.answered(reply.session, reply.turn, lost)
