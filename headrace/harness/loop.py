"""The agent loop: sample a turn, run its calls, append the results, until the policy finishes or a limit is reached.

Training, evaluation and production use this loop, with sampled and with scripted policies.

The caller writes the turn log and relies on two guarantees. The loop awaits `on_sampled` before it sends any call of
the turn. A resumed episode never samples a logged turn again; it repeats the calls of an open turn under the same ids.
Calls of one turn run concurrently, and their results are in call order. A call that changes the workspace runs alone,
after all earlier and before all later calls, so the effect of a turn never depends on the speed of its calls.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.engines.base import EngineError, Sampler, SampleRequest
from headrace.harness.context import Context
from headrace.harness.prompt import initial_prompt, toolbox_for
from headrace.harness.tools.base import Answer
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.base import Array
from headrace.messages.rollout import RolloutRequest, ToolCall, ToolResult, Turn, routes_end
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import Task
from headrace.rendering.base import Parsed, Renderer

Outcome = Literal["finished", "max_turns", "max_tokens", "wall_time", "context", "cancelled", "crashed"]
"""The last two are not the loop's: a rollout actor writes them, for an attempt that its user ended, and for one of
another harness that crashed."""
OnSampled = Callable[[Turn], Awaitable[None]]
OnDone = Callable[[int, tuple[ToolResult, ...]], Awaitable[None]]
OnStep = Callable[[int], Awaitable[None]]

_GOLDEN = 0x9E3779B97F4A7C15


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An ended episode: its turns, how it ended, and its counts."""

    turns: tuple[Turn, ...]
    outcome: Outcome
    malformed_calls: int = 0
    sampled_tokens: int = 0
    wall_s: float = 0.0


async def _ignore_sampled(turn: Turn) -> None:
    return None


async def _ignore_done(index: int, results: tuple[ToolResult, ...]) -> None:
    return None


async def _ignore_step(ended: int) -> None:
    return None


async def run_episode(
    *,
    engine: Sampler,
    sandbox: Sandbox,
    renderer: Renderer,
    request: RolloutRequest,
    task: Task,
    on_sampled: OnSampled = _ignore_sampled,
    on_done: OnDone = _ignore_done,
    on_step: OnStep = _ignore_step,
    resume: Sequence[Turn] = (),
    toolbox: Toolbox | None = None,
) -> Episode:
    """Run the attempt of `request`, or resume it.

    resume: the logged turns in order, each with the results of its TurnDone; only the last may have none.
    on_step: awaited with the number of steps that ended, after the calls of a turn that ends a step which is not the
    last, and before `on_done`.
    The wall-time limit counts from this call. SandboxLost, SearchLost and EngineError are raised: they are
    infrastructure failures, not outcomes.
    """
    attempt = _Attempt(engine, sandbox, renderer, request, task, (on_sampled, on_done, on_step), resume)
    box = toolbox or toolbox_for(task, renderer, request.limits.context_tokens)
    try:
        outcome = await attempt.run(box)
    finally:
        for session in attempt.sessions:
            await engine.close(session)
    turns = attempt.turns
    return Episode(
        turns=tuple(turns),
        outcome=outcome,
        malformed_calls=sum(bool(call.error) for turn in turns for call in turn.calls),
        sampled_tokens=sum(len(turn.ids) for turn in turns),
        wall_s=time.monotonic() - attempt.start,
    )


class _Budget(msgspec.Struct, frozen=True):
    """The bounds of one agent of an attempt."""

    turns: int
    tokens: int
    steps: int = 1
    caller: str | UnsetType = UNSET
    """As in `Turn`."""


class _Attempt:
    """The turns of an attempt, of its own agent and of the children to which that one delegates.

    The turns are in the order in which they were sampled, which is the order of the log: a child's turns stand between
    the turn that calls it and the turn after that. At most one agent samples at a time, because `delegate` runs alone.
    """

    def __init__(
        self,
        engine: Sampler,
        sandbox: Sandbox,
        renderer: Renderer,
        request: RolloutRequest,
        task: Task,
        on: tuple[OnSampled, OnDone, OnStep],
        resume: Sequence[Turn],
    ) -> None:
        self._engine, self._sandbox, self._renderer, self._request, self._task = (
            engine,
            sandbox,
            renderer,
            request,
            task,
        )
        self._on_sampled, self._on_done, self._on_step = on
        self._logged = deque(resume)
        self.turns: list[Turn] = []
        self.sessions: set[str] = set()
        self.start = time.monotonic()
        self._wall_s = task.sandbox_limits.time_s or request.limits.wall_s

    async def run(self, box: Toolbox) -> Outcome:
        """The attempt's own agent, to its end."""
        self._box, limits = box, self._request.limits
        box.delegate = self._delegate
        later = [step.prompt for step in self._task.later]
        context = self._context(initial_prompt(self._request, self._task), self._task.system, later)
        return await self._talk(context, _Budget(limits.max_turns, limits.max_tokens, 1 + len(later)))

    def _context(self, prompt: str, system: str, later: Sequence[str] = ()) -> Context:
        limits = self._request.limits
        # Without a reserve every request for a summary is longer than context_tokens, which is only its trigger then.
        summary_tokens = min(self._request.sampling.max_turn_tokens, limits.reserve_tokens // 2)
        longest = limits.context_tokens - summary_tokens if limits.reserve_tokens else None
        most = limits.context_tokens - limits.reserve_tokens
        return Context(self._renderer, prompt, most, longest, system=system, later=later, fresh=self._fresh)

    def _fresh(self) -> int:
        return 1 + max((turn.segment for turn in self.turns), default=-1)

    async def _talk(self, context: Context, budget: _Budget) -> Outcome:
        """One agent's turns until it ends: first the recorded ones, then sampled ones."""
        while True:
            if self._logged and self._logged[0].caller == budget.caller:
                turn = self._logged.popleft()
                context.take(turn)
                self.turns.append(turn)
                if len(turn.results) < len(turn.calls):
                    await self._answer(turn, context, budget)
                    continue
                self._box.recall(turn.calls)
                called = {call.id for call in turn.calls}
                while self._logged and self._logged[0].caller in called:
                    self._box.recall(self._logged[0].calls)
                    self.turns.append(self._logged.popleft())
                continue
            if (outcome := self._outcome(budget)) is not None:
                return outcome
            more = context.next_ids()
            kind: Literal["act", "summary"] = "act"
            if context.full(more):
                if not context.ids:
                    return "context"
                more, kind = context.summary_ids(), "summary"
            session = f"{self._request.trajectory}/{context.segment}"
            self.sessions.add(session)
            left = min(self._left(), budget.tokens - sum(len(turn.ids) for turn in self._of(budget)))
            sampled = self._engine, self._renderer, self._request, context, more, kind, self.turns, session
            turn = await sample_turn(*sampled, left=left, caller=budget.caller)
            await self._on_sampled(turn)
            context.take(turn)
            self.turns.append(turn)
            if kind == "act":
                await self._answer(turn, context, budget)
            else:
                await self._close(session)
                await self._on_done(turn.index, ())

    async def _close(self, session: str) -> None:
        await self._engine.close(session)
        self.sessions.discard(session)

    async def _answer(self, turn: Turn, context: Context, budget: _Budget) -> None:
        """Run the turn's calls and close it."""
        prefix = f"{self._request.trajectory}/"
        results = context.fitting(await _run_calls(turn.calls, self._box, self._sandbox, self._task, prefix))
        if turn.finishes and (ended := _finished(self.turns)) < budget.steps:
            await self._on_step(ended)
        await self._on_done(turn.index, results)
        context.answer(results)
        self.turns[turn.index] = msgspec.structs.replace(turn, results=results)

    async def _delegate(self, call: str, prompt: str, turns: int) -> Answer:
        """Run a child agent; the answer is what it says at its end. It has at most half of the tokens that are left."""
        context = self._context(prompt, self._task.system)
        acts = sum(turn.kind == "act" for turn in self.turns)
        budget = _Budget(min(turns, self._request.limits.max_turns - acts), self._left() // 2, caller=call)
        self._box.delegate = None  # a child has no children
        try:
            outcome = await self._talk(context, budget)
        finally:
            self._box.delegate = self._delegate
        if (session := f"{self._request.trajectory}/{context.segment}") in self.sessions:
            await self._close(session)
        mine = self._of(budget)
        said = [made.arguments.get("message", "") for turn in mine for made in turn.calls if made.name == "finish"]
        text = ""
        if mine:
            ids, prompt_ids = ([int(id) for id in array.tolist()] for array in (mine[-1].ids, mine[-1].prompt_ids))
            text = self._renderer.parse(ids, prompt=prompt_ids).text
        report = (said[-1] if said else "") or text.strip() or "It says nothing."
        return Answer(f"{report}\n[{outcome}: {len(mine)} turns]", ok=outcome == "finished")

    def _of(self, budget: _Budget) -> list[Turn]:
        """The turns of one agent."""
        return [turn for turn in self.turns if turn.caller == budget.caller]

    def _left(self) -> int:
        """Tokens that the attempt may still sample."""
        return self._request.limits.max_tokens - sum(len(turn.ids) for turn in self.turns)

    def _outcome(self, budget: _Budget) -> Outcome | None:
        """How the agent ends; None while it continues."""
        mine, limits = self._of(budget), self._request.limits
        ends = _finished(mine) if budget.caller is UNSET else sum(turn.says_finish for turn in mine)
        if ends >= budget.steps:
            return "finished"
        counted = mine if budget.caller is not UNSET else self.turns
        if sum(turn.kind == "act" for turn in counted) >= budget.turns:
            return "max_turns"
        if self._left() <= 0 or sum(len(turn.ids) for turn in mine) >= budget.tokens:
            return "max_tokens"
        if time.monotonic() - self.start >= self._wall_s:
            return "wall_time"
        if sum(turn.kind == "summary" for turn in mine) > limits.max_summaries or _grew(mine):
            return "context"
        return None


def _finished(turns: Sequence[Turn]) -> int:
    """Number of steps that the turns ended."""
    return sum(turn.finishes for turn in turns)


def _grew(turns: Sequence[Turn]) -> bool:
    """Whether the last turn is a summary that is not shorter than the text it replaces.

    Such a summary frees no context, and each next summary would be longer, up to the token limit.
    """
    if not turns or turns[-1].kind != "summary":
        return False
    *before, last = (turn for turn in turns if turn.segment == turns[-1].segment)
    replaced = sum(len(turn.prompt_ids) + len(turn.ids) for turn in before) + len(last.prompt_ids)
    return len(last.ids) >= replaced


async def sample_turn(
    engine: Sampler,
    renderer: Renderer,
    request: RolloutRequest,
    context: Context,
    more: Sequence[int],
    kind: Literal["act", "summary"],
    turns: Sequence[Turn],
    session: str,
    *,
    left: int,
    caller: str | UnsetType = UNSET,
) -> Turn:
    """One generation as a Turn whose calls have not run. left: tokens that its agent may still sample."""
    cap = min(request.sampling.max_turn_tokens, left)
    sample = await engine.sample(
        SampleRequest(
            session=session,
            ids=(*context.ids, *more),
            policy=request.policy,
            sampling=msgspec.structs.replace(request.sampling, max_turn_tokens=cap),
            stop_ids=renderer.stop_ids,
            seed=(request.seed + context.segment * _GOLDEN) % (1 << 63),
            lane=request.lane,
            routed=routes_end(turns, context.segment),
        )
    )
    if sample.stop == "abort":
        raise EngineError(f"the engine gave up on {session}")
    index = len(turns)
    parsed = renderer.parse(sample.ids, prompt=more)
    return Turn(
        index=index,
        segment=context.segment,
        prompt_ids=Array.of(more, "<i4"),
        ids=Array.of(sample.ids, "<i4"),
        logprobs=Array.of(sample.logprobs, "<f4"),
        routed=sample.routed,
        routed_start=sample.routed_start,
        spans=sample.spans,
        calls=calls_of(parsed, index, request.limits.max_parallel_calls) if kind == "act" else (),
        stop=sample.stop,
        kind=kind,
        kinds=parsed.kinds,
        caller=caller,
    )


def calls_of(parsed: Parsed, index: int, limit: int) -> tuple[ToolCall, ...]:
    """The calls of a turn, with ids that are unique in the trajectory; those over the limit are refused."""
    calls = []
    for place, call in enumerate(parsed.calls):
        error = call.error or (f"more than {limit} calls in one turn" if place >= limit else "")
        calls.append(msgspec.structs.replace(call, id=f"{index}.{place}", error=error))
    return tuple(calls)


async def _run_calls(
    calls: Sequence[ToolCall], box: Toolbox, sandbox: Sandbox, task: Task, prefix: str
) -> tuple[ToolResult, ...]:
    """Results in call order; calls that only read run concurrently, a call that writes runs alone."""
    results: list[ToolResult] = []
    together: list[ToolCall] = []

    async def flush() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(box.run(call, sandbox, task, prefix)) for call in together]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        results.extend(task.result() for task in tasks)
        together.clear()

    for call in calls:
        if box.writes(call):
            await flush()
            results.append(await box.run(call, sandbox, task, prefix))
        else:
            together.append(call)
    await flush()
    return tuple(results)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
