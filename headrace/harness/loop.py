"""The agent loop: sample a turn, run its calls, append the results, until the policy finishes or a limit is reached.

Training, evaluation and production use this loop, with sampled and with scripted policies.

The caller writes the turn log and relies on two guarantees. The loop awaits `on_sampled` before it sends any call of
the turn. A resumed episode never samples a logged turn again; it repeats the calls of an open turn under the same ids.
Calls of one turn run concurrently, and their results are in call order. A call that changes the workspace runs alone,
after all earlier and before all later calls, so the effect of a turn never depends on the speed of its calls.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from headrace.engines.base import EngineError, Sampler, SampleRequest
from headrace.harness.context import Context
from headrace.harness.prompt import initial_prompt, toolbox_for
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
    limits, wall_s = request.limits, task.sandbox_limits.time_s or request.limits.wall_s
    box = toolbox or toolbox_for(task, renderer, limits.context_tokens)
    # Without a reserve every request for a summary is longer than context_tokens, which is only its trigger then.
    summary_tokens = min(request.sampling.max_turn_tokens, limits.reserve_tokens // 2)
    longest = limits.context_tokens - summary_tokens if limits.reserve_tokens else None
    later = [step.prompt for step in task.later]
    most = limits.context_tokens - limits.reserve_tokens
    context = Context(renderer, initial_prompt(request, task), most, longest, system=task.system, later=later)
    turns: list[Turn] = []
    start = time.monotonic()
    sessions: set[str] = set()

    async def answer(turn: Turn) -> Turn:
        """Run the turn's calls and close it."""
        results = context.fitting(await _run_calls(turn.calls, box, sandbox, task, f"{request.trajectory}/"))
        if turn.finishes and (ended := 1 + _finished(turns)) <= len(later):
            await on_step(ended)
        await on_done(turn.index, results)
        context.answer(results)
        return msgspec.structs.replace(turn, results=results)

    for turn in resume:
        context.take(turn)
        if len(turn.results) == len(turn.calls):
            box.recall(turn.calls)
            turns.append(turn)
        else:
            turns.append(await answer(turn))

    try:
        while (outcome := _outcome(turns, request, start, wall_s, 1 + len(later))) is None:
            more = context.next_ids()
            kind: Literal["act", "summary"] = "act"
            if context.full(more):
                if not context.ids:
                    outcome = "context"
                    break
                more, kind = context.summary_ids(), "summary"
            session = f"{request.trajectory}/{context.segment}"
            sessions.add(session)
            turn = await sample_turn(engine, renderer, request, context, more, kind, turns, session)
            await on_sampled(turn)
            context.take(turn)
            if kind == "summary":
                await engine.close(session)
                sessions.discard(session)
                await on_done(turn.index, ())
                turns.append(turn)
            else:
                turns.append(await answer(turn))
    finally:
        for session in sessions:
            await engine.close(session)
    return Episode(
        turns=tuple(turns),
        outcome=outcome,
        malformed_calls=sum(bool(call.error) for turn in turns for call in turn.calls),
        sampled_tokens=sum(len(turn.ids) for turn in turns),
        wall_s=time.monotonic() - start,
    )


def _finished(turns: Sequence[Turn]) -> int:
    """Number of steps that the turns ended."""
    return sum(turn.finishes for turn in turns)


def _outcome(turns: Sequence[Turn], request: RolloutRequest, start: float, wall_s: float, steps: int) -> Outcome | None:
    """How the episode ended; None while it continues."""
    limits = request.limits
    if _finished(turns) >= steps:
        return "finished"
    if sum(turn.kind == "act" for turn in turns) >= limits.max_turns:
        return "max_turns"
    if sum(len(turn.ids) for turn in turns) >= limits.max_tokens:
        return "max_tokens"
    if time.monotonic() - start >= wall_s:
        return "wall_time"
    if sum(turn.kind == "summary" for turn in turns) > limits.max_summaries or _grew(turns):
        return "context"
    return None


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
) -> Turn:
    """One generation as a Turn whose calls have not run."""
    left = request.limits.max_tokens - sum(len(turn.ids) for turn in turns)
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
