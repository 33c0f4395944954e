"""Samples turns for agents that run their own tools, and records them.

A turn's input is the client's messages. The turn log holds the whole state of a session, and an actor reads it there if
another actor sampled the last turn. So any rollout actor of the production lane can answer any turn, and an actor that
is killed loses at most the turn that it was sampling. A turn may be stored and its answer lost (the request ran out of
time, or the gateway was killed): the next request is then refused with `behind`, and the gateway samples it in a
branch, because the client repeats messages that the session's ids hold already. When a session ends, it becomes a
Trajectory with the sampled token ids, log-probabilities, routed experts and versions.

While a streamed turn is sampled, the actor sends its text in parts. They are made of the ids so far by the parser that
reads the whole turn, and the answer at the end has the whole turn. A client that goes away cuts its turn: what was
sampled until then is recorded.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol

import msgspec

from headrace.actors.rollout import publication, spans
from headrace.actors.rollout.pins import NoPolicy
from headrace.actors.rollout.policies import ClientServed
from headrace.actors.rollout.turn_log import ResumeState, TurnLog
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, WrongSequence
from headrace.engines.base import Engine, EngineError, Progress, Sample, SampleRequest, Unsupported
from headrace.messages.base import Array
from headrace.messages.operations import Ack
from headrace.messages.plugins import Plugin
from headrace.messages.product import (
    CLIENT_SUITE,
    ClientCall,
    ClientMessage,
    ClientSessionEnd,
    ClientTurn,
    ClientTurnDone,
    ClientTurnPart,
    ClientUsage,
    TokenLogprob,
    TurnStop,
    TurnTokens,
)
from headrace.messages.rollout import (
    Capture,
    Lane,
    PolicyRef,
    Sampling,
    TokenKinds,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    routes_end,
    versions,
)
from headrace.messages.tasks import TaskRef
from headrace.rendering.native.client import ClientRenderer, UnusableConversation
from headrace.rendering.native.live import LiveTurn, Settled, arguments_json
from headrace.rendering.parsers.base import Completion, unfinished

PART_S = 0.02
"""Seconds between two parts of a turn, at least. The first token goes out at once."""
SHARE = 20
"""Reading the turns under way for their parts takes at most this fraction of the actor's time."""
Serve = Callable[[PolicyRef], AbstractAsyncContextManager[ClientServed]]


class Record(Protocol):
    """Where the turns of a session are stored: `TurnLog`."""

    async def read(self) -> ResumeState:
        """The stored turns."""

    async def is_current(self) -> bool:
        """Whether nobody else has written since."""

    async def sampled(self, turn: Turn, node: str, sandbox: str, fingerprint: str) -> None:
        """Store a turn. WrongSequence."""

    async def done(self, index: int, results: Sequence[ToolResult]) -> None:
        """Store a turn's results while the next one is sampled."""

    async def flush(self) -> None:
        """Wait until all is stored."""


class _Session:
    """A session in the cache; all of it can be read from its record again."""

    def __init__(self, log: Record, turns: Sequence[Turn]) -> None:
        self.log = log
        self.turns = list(turns)
        self.used = time.monotonic()
        self.sampling = False
        self.engine: Engine | None = None
        """The engine that sampled its last turn here: a session may be of another run's policy."""

    @property
    def ids(self) -> list[int]:
        """The token ids of its context so far."""
        return [id for turn in self.turns for id in (*turn.prompt_ids.tolist(), *turn.ids.tolist())]


class _UnderWay:
    """A turn that may be cut."""

    def __init__(self, task: "asyncio.Task[object]", progress: Progress) -> None:
        self.task, self.progress = task, progress

    def cut(self) -> None:
        """End it: with its tokens if it has any."""
        if self.progress.is_cut:
            return
        self.progress.cut()
        if not self.progress.ids:
            self.task.cancel()


class ClientTurns:
    """Answers clients' turns, and caches the sessions of this rollout actor."""

    lane: Lane = "production"

    def __init__(self, bus: Bus, rollout: str, serve: Serve, plugins: tuple[Plugin, ...], idle_s: float) -> None:
        """serve: opens the engine and format of a policy. plugins: this actor's engine and renderer, if they are
        plugins. idle_s: `[production] idle_s`."""
        self._bus, self._rollout, self._serve, self._plugins = bus, rollout, serve, plugins
        self._idle_s = idle_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """Least recently used first."""
        self._under_way: dict[str, _UnderWay] = {}
        self._streams = 0
        """Turns whose parts are sent."""

    def cut(self, id: str) -> None:
        """End a turn that nobody waits for any more. Does nothing for a turn of another actor, or one that ended."""
        if (turn := self._under_way.get(id)) is not None:
            turn.cut()

    async def forget(self, user: str) -> None:
        """Drop the cached sessions of a user whose data is purged, in the engine too."""
        for group in [group for group in self._sessions if group.startswith(f"{user}.")]:
            await self._drop(group)

    async def _drop(self, group: str) -> None:
        """Forget a session, in the engine too. Does nothing for a group without one."""
        session = self._sessions.pop(group, None)
        if session is not None and session.engine is not None:
            await session.engine.close(_context_of(group))

    async def turn(self, request: ClientTurn) -> ClientTurnDone:
        """Sample and record a turn. The reply has `refused` for an unusable conversation, `failed` for
        infrastructure."""
        task, progress = asyncio.current_task(), Progress(followed=request.stream or bool(request.stops))
        assert task is not None
        if request.id:
            self._under_way[request.id] = _UnderWay(task, progress)
        try:
            async with self._serve(request.policy) as serving:
                renderer = serving.renderer(request)
                if request.count_only:
                    return ClientTurnDone(usage=ClientUsage(prompt=len(renderer.start(request.messages))))
                try:
                    return await self._sampled(request, serving.engine, renderer, progress)
                except WrongSequence:  # another rollout actor wrote a turn meanwhile: read its records first
                    if progress.ids and request.stream:
                        raise  # parts of it are at the client
                    await self._drop(request.group)
                    return await self._sampled(request, serving.engine, renderer, progress)
        except asyncio.CancelledError:
            if not progress.is_cut:
                raise
            task.uncancel()
            return ClientTurnDone(failed="the turn was cut before its first token")
        except (UnusableConversation, Unsupported) as error:
            return ClientTurnDone(refused=str(error), full=isinstance(error, ConversationTooLong))
        except WrongSequence:
            await self._drop(request.group)
            return ClientTurnDone(failed="another rollout actor sampled a turn of this session at the same time")
        except EngineError as error:
            return ClientTurnDone(failed=f"the engine could not sample: {error}")
        except NoPolicy as error:
            return ClientTurnDone(failed=str(error))
        finally:
            self._under_way.pop(request.id, None)

    async def _session(self, run: str, group: str) -> _Session:
        session = self._sessions.get(group)
        before = session
        if session is not None and not session.sampling and not await session.log.is_current():
            session = None  # another rollout actor has answered a turn since
        if session is None:
            log = self._record(run, group)
            session = self._sessions[group] = _Session(log, (await log.read()).turns)
            if before is not None:
                session.engine = before.engine
        session.used = time.monotonic()
        self._sessions.move_to_end(group)
        return session

    def _record(self, run: str, group: str) -> Record:
        """The record of a session."""
        return TurnLog(self._bus, run, group, trajectory_of(group))

    async def _say(self, turn: str, part: ClientTurnPart) -> None:
        """Send a part of the turn under way with this id."""
        await self._bus.say(part)

    async def _forget_idle(self) -> None:
        """Drop the sessions that no request used for `idle_s`."""
        before = time.monotonic() - self._idle_s
        while self._sessions:
            group, session = next(iter(self._sessions.items()))
            if session.used > before or session.sampling:
                return
            await self._drop(group)

    async def _sampled(
        self, request: ClientTurn, engine: Engine, renderer: ClientRenderer, progress: Progress
    ) -> ClientTurnDone:
        await self._forget_idle()
        session = await self._session(request.run, request.group)
        session.sampling, session.engine = True, engine
        try:
            if request.answer and request.tools:
                # No grammar covers both a format's calls and an answer's schema. Words without a call are thrown away.
                done = await self._turn(session, request, engine, renderer, progress, free=True)
                if done is not None:
                    return done
            done = await self._turn(session, request, engine, renderer, progress)
            assert done is not None
            return done
        finally:
            session.sampling = False

    async def _turn(
        self,
        session: _Session,
        request: ClientTurn,
        engine: Engine,
        renderer: ClientRenderer,
        progress: Progress,
        *,
        free: bool = False,
    ) -> ClientTurnDone | None:
        """Sample and record a turn, or answer a recorded one. free: without the grammar of the answer; a turn without a
        call is neither told nor recorded then: None."""
        if request.recorded >= 0:
            return _again(session.turns, request, renderer)
        context, inherited = session.ids, list[int]()
        if session.turns and _is_behind(request, session.turns[-1], renderer):
            return ClientTurnDone(failed="the session has a turn whose answer the client never got", behind=True)
        if (place := request.behind) is not None:
            turns = session.turns if session.turns else (await self._session(request.run, place.group)).turns
            if len(turns) <= place.index:
                raise UnusableConversation("the record of the response that this one follows is gone: send its history")
            turns = turns[: place.index + 1]
            inherited = [] if context else _Session(session.log, turns).ids
            before = outline(turns)
            request = msgspec.structs.replace(
                request, messages=(*before, *request.messages), known=len(before), behind=None
            )
        else:
            turns = session.turns
        if turns and request.known:
            last = turns[-1]
            results = _results(request)
            if context and last.calls and not last.results and results:
                await session.log.done(last.index, results)
                session.turns[-1] = msgspec.structs.replace(last, results=results)
            stopped = int(last.ids.tolist()[-1]) if last.stop == "stop" else None
            more = [*inherited, *renderer.delta(request.messages, request.known, stopped=stopped)]
        else:
            more = renderer.start(request.messages)
        forced: list[int] = []
        if request.forced or (request.answer and not free and renderer.thinks(more)):
            forced = renderer.forced(request.messages, request.forced)
        opening, more = more, [*more, *forced]
        limit = min(request.sampling.max_turn_tokens, request.context_tokens - len(context) - len(more))
        if limit < 1:
            raise ConversationTooLong(
                # In the words by which Claude Code, OpenCode and LiteLLM know it, and shorten the history.
                f"prompt is too long: {len(context) + len(more)} tokens, and the maximum context length is "
                f"{request.context_tokens} with the answer: send a shorter history"
            )
        trajectory = trajectory_of(request.group)
        index, prompt = len(session.turns), len(context) + len(more)
        asked = SampleRequest(
            session=_context_of(request.group),
            ids=(*context, *more),
            policy=request.policy,
            sampling=_limited(request, limit),
            stop_ids=renderer.stop_ids,
            seed=request.seed,
            lane=self.lane,
            routed=routes_end(session.turns, 0),
            answer=request.answer,
            free=free,
            progress=progress,
        )
        parts = _Parts(
            msgspec.structs.replace(request, stream=request.stream and not free),
            index,
            ClientUsage(prompt=prompt, cached=len(context)),
        )
        async with self._telling(parts, progress, renderer.live(opening), forced):
            sample = await spans.sample(engine, asked, trajectory)
        if sample.stop == "abort" and not progress.is_cut:
            raise EngineError(f"the engine aborted a turn of {trajectory}")
        if request.stops:
            sample = _stopped(sample, prompt, request, index, lambda ids: renderer.parse(ids, prompt=opening), forced)
        ids = (*forced, *sample.ids)
        parsed = renderer.parse(ids, prompt=opening)
        kinds = renderer.kinds(ids, parsed, len(forced))
        answer = _answer(parsed, request, index)
        if free and not (answer.calls or request.forced or sample.stop == "abort"):
            return None
        turn = _turn(index, more, sample, answer.calls, kinds, len(forced))
        await session.log.sampled(turn, "", "", engine.fingerprint)
        session.turns.append(turn)
        return _told(turn, request, renderer, session.turns[:-1])

    @asynccontextmanager
    async def _telling(
        self, parts: "_Parts", progress: Progress, live: LiveTurn, forced: Sequence[int]
    ) -> AsyncIterator[None]:
        """Send the parts of a turn while it is sampled in this context, and end it where its text has a stop."""
        if not progress.followed:
            yield
            return
        telling = asyncio.create_task(self._tell(parts, progress, live, forced))
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1
            telling.cancel()
            with suppress(asyncio.CancelledError, BusError):  # the answer has what a part that was lost had
                await telling

    async def _tell(self, parts: "_Parts", progress: Progress, live: LiveTurn, forced: Sequence[int]) -> None:
        while True:
            ids = await progress.news()
            began = time.perf_counter()
            settled = parts.ended(live.read([*forced, *ids]))
            if (part := parts.next(settled, len(ids))) is not None:
                await self._say(parts.turn, part)
            if parts.stopped:
                progress.cut()
                return
            took = time.perf_counter() - began
            await asyncio.sleep(max(PART_S, SHARE * self._streams * took))

    async def end(self, request: ClientSessionEnd) -> Ack:
        """Publish the session's Trajectory; a session without a turn gets none. A repeated request changes nothing."""
        if request.group in self._sessions:
            with suppress(WrongSequence):  # another actor sampled the turn after those results
                await self._sessions[request.group].log.flush()
            await self._drop(request.group)
        # Read, not cached: another actor may have sampled the turns after those of this one.
        session = await self._session(request.run, request.group)
        if not session.turns:
            return Ack(detail="no turn was sampled")
        id = trajectory_of(request.group)
        async with self._serve(request.policy) as serving:
            trajectory = Trajectory(
                run=request.run,
                lane="production",
                group=request.group,
                slot=0,
                attempt=0,
                id=id,
                task=TaskRef(suite=CLIENT_SUITE, task=request.tenant),
                family=CLIENT_SUITE,
                seed=request.seed,
                policy=request.policy,
                sampling=request.sampling,
                outcome="finished",
                turns=tuple(session.turns),
                diff={},
                fingerprint=serving.engine.fingerprint,
                renderer=serving.bundle,
                rollout=self._rollout,
                capture=Capture(
                    training_allowed=request.training_allowed, untrainable=request.untrainable, labels=request.labels
                ),
                plugins=self._plugins,
            )
        await publication.publish(self._bus, trajectory)
        self._sessions.pop(request.group, None)
        return Ack(detail=id)


class ConversationTooLong(UnusableConversation):
    """The conversation is longer than the policy's context."""


def trajectory_of(group: str) -> str:
    """The id of a session's trajectory: slot 0, attempt 0."""
    return f"{group}-0-0"


class _Parts:
    """The parts of one turn."""

    def __init__(self, turn: ClientTurn, index: int, usage: ClientUsage) -> None:
        """index: of the turn in its session. usage: of its prompt."""
        self._turn, self._index, self._usage, self.turn = turn, index, usage, turn.id
        self._sent, self._number = Settled(), 0
        self.stopped = False
        """Whether its text has one of its stops."""

    def ended(self, settled: Settled) -> Settled:
        """The part of a turn with stops that goes out: it ends before the first, and before what may begin one."""
        stops = self._turn.stops
        at, stop = _first(settled.text, stops)
        self.stopped = bool(stop)
        if not stop and not settled.calls:
            at -= unfinished(settled.text, stops)
        calls = () if stop else settled.calls
        return msgspec.structs.replace(settled, text=settled.text[:at].rstrip() if stops else settled.text, calls=calls)

    def next(self, settled: Settled, sampled: int) -> ClientTurnPart | None:
        """The part with what came since the last one. None when nothing did, or when the engine began the turn again
        with other weights: then the answer alone is right."""
        if not self._turn.stream:
            return None
        before = self._sent
        if before.text or before.calls:  # a client gets the thinking before the text; more of it comes with the answer
            settled = msgspec.structs.replace(settled, thinking=before.thinking)
        if not (settled.thinking.startswith(before.thinking) and settled.text.startswith(before.text)):
            return None
        sent = {call.at: call.arguments for call in before.calls}
        calls: list[ClientCall] = []
        for call in settled.calls if self._turn.parallel else settled.calls[:1]:
            had = sent.get(call.at, "")
            if not call.arguments.startswith(had):
                return None
            if call.at not in sent or len(call.arguments) > len(had):
                id = call_id(self._turn.group, self._index, call.at)
                calls.append(ClientCall(id=id, name=call.name, arguments=call.arguments[len(had) :]))
        part = ClientTurnPart(
            number=self._number,
            usage=msgspec.structs.replace(self._usage, sampled=sampled),
            thinking=settled.thinking[len(before.thinking) :],
            text=settled.text[len(before.text) :],
            calls=tuple(calls),
        )
        if self._number and not (part.thinking or part.text or part.calls):
            return None
        shown = {call.at: call for call in (*before.calls, *settled.calls)}
        self._sent, self._number = msgspec.structs.replace(settled, calls=tuple(shown.values())), self._number + 1
        return part


def call_id(group: str, index: int, at: int) -> str:
    """The id of call `at` of turn `index` of a session."""
    return f"call_{trajectory_of(group)}_{index}_{at}"


def _answer(parsed: Completion, request: ClientTurn, index: int) -> ClientTurnDone:
    """The thinking, the texts and the calls that the client gets for turn `index`."""
    calls = tuple(
        ClientCall(id=call_id(request.group, index, at), name=call.name, arguments=arguments_json(call.arguments))
        for at, call in enumerate(parsed.calls)
        if not call.error
    )
    text, after = parsed.texts
    malformed = [f"[a tool call that cannot be read: {call.error}]" for call in parsed.calls if call.error]
    at, stop = _first(text, request.stops)
    if stop:
        return ClientTurnDone(thinking=parsed.thinking, text=text[:at].rstrip(), stopped_by=stop)
    notes = "\n".join(filter(None, (after if calls else text, *malformed)))
    return ClientTurnDone(
        thinking=parsed.thinking,
        text=text if calls else notes,
        calls=calls if request.parallel else calls[:1],
        after=notes if calls else "",
    )


def _first(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Where the first of the stops begins, and which it is; the end of the text and none."""
    places = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(places, default=(len(text), ""))


def _stopped(
    sample: Sample,
    prompt: int,
    request: ClientTurn,
    index: int,
    parse: Callable[[Sequence[int]], Completion],
    forced: Sequence[int],
) -> Sample:
    """A sample that ends with the token that ended its first stop, however late the engine was cut. prompt: ids before
    it."""

    def has(count: int) -> bool:
        return bool(_answer(parse((*forced, *sample.ids[:count])), request, index).stopped_by)

    count = bisect_left(range(len(sample.ids)), True, key=has)
    if count == len(sample.ids):
        return sample
    end = prompt + count - 1
    spans_left = [msgspec.structs.replace(span, end=min(span.end, end)) for span in sample.spans if span.start < end]
    first = sample.routed_start if isinstance(sample.routed_start, int) else sample.spans[0].start
    routed = sample.routed
    if routed is not None:
        rows = max(0, end - first)
        shape = (rows, *routed.shape[1:])
        routed = Array(routed.dtype, shape, routed.data[: rows * (len(routed.data) // len(routed))])
    return msgspec.structs.replace(
        sample,
        ids=sample.ids[:count],
        logprobs=sample.logprobs[:count],
        spans=tuple(spans_left),
        routed=routed,
        stop="abort",
    )


def _context_of(group: str) -> str:
    """The name of a session's context in the engine."""
    return f"{trajectory_of(group)}/0"


def _stop(sampled: str, answer: ClientTurnDone) -> TurnStop:
    """Why a turn ended, for its client: one that was cut without a stop has reached a limit."""
    if answer.stopped_by:
        return "stop"
    return "length" if sampled != "stop" else "calls" if answer.calls else "stop"


def _again(turns: Sequence[Turn], request: ClientTurn, renderer: ClientRenderer) -> ClientTurnDone:
    """The answer of a recorded turn as it was given."""
    turn = next((turn for turn in turns if turn.index == request.recorded), None)
    if turn is None:
        return ClientTurnDone(failed=f"the record has no turn {request.recorded}")
    return _told(turn, request, renderer, [each for each in turns if each.index < turn.index])


def _told(turn: Turn, request: ClientTurn, renderer: ClientRenderer, earlier: Sequence[Turn]) -> ClientTurnDone:
    """The answer of a recorded turn. earlier: the turns of its session before it."""
    cached = sum(len(each.prompt_ids) + len(each.ids) for each in earlier)
    ids, parsed = _read(turn, renderer)
    answer = _answer(parsed, request, turn.index)
    logprobs = turn.logprobs.tolist()
    words = renderer.words(ids, parsed) if request.logprobs else []
    return msgspec.structs.replace(
        answer,
        stop=_stop(turn.stop, answer),
        usage=ClientUsage(prompt=cached + len(turn.prompt_ids), cached=cached, sampled=len(turn.ids)),
        version=max((span.version for span in turn.spans), default=-1),
        logprobs=tuple(
            TokenLogprob(text=text, logprob=logprobs[at - turn.forced]) for at, text in words if at >= turn.forced
        ),
        tokens=_tokens([*earlier, turn]) if request.tokens else None,
    )


def _tokens(turns: Sequence[Turn]) -> TurnTokens:
    """The tokens of the last of a session's turns."""
    *earlier, turn = turns
    before = [id for each in earlier for id in (*_ids(each.prompt_ids), *_ids(each.ids))]
    return TurnTokens(
        prompt_ids=Array.of([*before, *_ids(turn.prompt_ids)], "<i4"),
        ids=turn.ids,
        logprobs=turn.logprobs,
        versions=Array.of(versions(turns)[-len(turn.ids) :], "<i4"),
        routed=_routes(turns),
    )


def _routes(turns: Sequence[Turn]) -> Array | None:
    """The routes of every forwarded position, each from its first forward. None where a position has none."""
    data, end = b"", 0
    for turn in turns:
        if turn.routed is None or turn.first_routed > end:
            return None
        width = len(turn.routed.data) // len(turn.routed) if len(turn.routed) else 0
        data += turn.routed.data[(end - turn.first_routed) * width :]
        end = max(end, turn.first_routed + len(turn.routed))
    last = turns[-1].routed
    length = sum(len(each.prompt_ids) + len(each.ids) for each in turns) - 1
    return None if last is None or end != length else Array(last.dtype, (end, *last.shape[1:]), data)


def _read(turn: Turn, renderer: ClientRenderer) -> tuple[list[int], Completion]:
    """The ids of a recorded turn, with those that were forced, as the policy's format reads them."""
    prompt = _ids(turn.prompt_ids)
    opening = len(prompt) - turn.forced
    ids = [*prompt[opening:], *_ids(turn.ids)]
    return ids, renderer.parse(ids, prompt=prompt[:opening])


def outline(turns: Sequence[Turn]) -> list[ClientMessage]:
    """Messages with the calls of recorded turns and without their texts: the end of a turn and what follows it render
    behind them as behind the history itself."""
    messages = [ClientMessage(role="user", text=".")]
    for turn in turns:
        if len(messages) > 1:
            calls = messages[-1].calls
            answers = [ClientMessage(role="tool", text=".", call_id=call.id) for call in calls]
            messages += answers or [ClientMessage(role="user", text=".")]
        calls = tuple(ClientCall(id=c.id, name=c.name, arguments=json.dumps(c.arguments)) for c in turn.calls)
        messages.append(ClientMessage(role="assistant", calls=calls))
    return messages


def _is_behind(request: ClientTurn, last: Turn, renderer: ClientRenderer) -> bool:
    """Whether the session's last turn is not the one that the request continues: its answer did not arrive."""
    if request.behind is not None:
        return (request.group, last.index) != (request.behind.group, request.behind.index)
    if not request.known:
        return True
    answer = _answer(_read(last, renderer)[1], request, last.index)
    answered = request.messages[request.known - 1]
    names = [(call.id, call.name) for call in answer.calls]
    given = [(call.id, call.name) for call in answered.calls]
    text, said = answered.text.strip(), answer.said
    if last.stop == "abort":  # the request that a stop ended had stops that this one may not have
        return not said.startswith(text) or (bool(given) and given != names)
    return (text, given) != (said, names)


def _ids(array: Array) -> list[int]:
    return [int(id) for id in array.tolist()]


def _limited(request: ClientTurn, limit: int) -> Sampling:
    return msgspec.structs.replace(request.sampling, max_turn_tokens=limit)


def _results(request: ClientTurn) -> tuple[ToolResult, ...]:
    """The results that the client's tools gave for the calls of the last turn."""
    return tuple(
        ToolResult(call_id=message.call_id, ok=True, output=message.text)
        for message in request.messages[request.known :]
        if message.role == "tool"
    )


def _turn(
    index: int, more: Sequence[int], sample: Sample, calls: Sequence[ClientCall], kinds: TokenKinds, forced: int
) -> Turn:
    return Turn(
        index=index,
        segment=0,
        prompt_ids=Array.of(more, "<i4"),
        ids=Array.of(sample.ids, "<i4"),
        logprobs=Array.of(sample.logprobs, "<f4"),
        routed=sample.routed,
        routed_start=sample.routed_start,
        spans=sample.spans,
        calls=tuple(ToolCall(id=call.id, name=call.name, arguments=_texts(call.arguments)) for call in calls),
        stop=sample.stop,
        kinds=kinds,
        forced=forced,
    )


def _texts(arguments: str) -> dict[str, str]:
    """A call's JSON arguments as a ToolCall has them: strings unchanged, other values as JSON text."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in json.loads(arguments).items()
    }
