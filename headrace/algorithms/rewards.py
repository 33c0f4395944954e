"""The registry of rewards, and the built-in reward: the verdict's value minus a concave penalty for effort.

The penalty is that of Composer 2 (arXiv 2603.24477, section 4.1):

    C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)),   q = 1: log(1 + kx) / k

It is concave and increasing with slope 1 at 0: the first tokens of an attempt cost the most, so a long attempt at a
hard task is not discouraged. x is a weighted sum of the sampled tokens of thinking, of calls and of text, of the calls
and of the turns. By default a turn costs more than a call, so parallel calls in one turn are cheaper than the same
calls in several turns.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.messages.judging import RubricScore, StepScore, TurnRewards
from headrace.messages.rollout import TokenKinds, Trajectory
from headrace.messages.sandbox import TestOutcome
from headrace.registry import Registry

REFUSED = 1.0
"""The penalty for output that the judge refuses to read, so that no attempt prefers it to an honest failure."""


Amount = Annotated[float, Meta(ge=0.0, le=1e12)]
Factor = Annotated[float, Meta(ge=0.0, le=1e6)]


class Shaped(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the built-in reward, in `[algorithm.options.reward]`."""

    length_penalty: Amount = 0.0
    """Weight of the concave penalty for effort, a weighted sum of tokens by kind, calls and turns."""
    length_k: Annotated[float, Meta(gt=0.0, le=1e12)] = 0.01
    """k of the penalty: the larger, the earlier it flattens."""
    length_q: Amount = 0.5
    """q of the penalty: 0 is linear, 1 logarithmic; above 1 the penalty has an upper bound."""
    length_thinking_tokens: Factor = 1.0
    """Effort of one sampled token of thinking; the kinds are counted by the policy's renderer."""
    length_call_tokens: Factor = 1.0
    """Effort of one sampled token of a tool call."""
    length_text_tokens: Factor = 1.0
    """Effort of every other sampled token: the final message, summaries, the ends of turns."""
    length_calls: Factor = 4.0
    """Effort of one tool call, beside its tokens."""
    length_turns: Factor = 16.0
    """Effort of one turn, beside its tokens."""
    overlong_penalty: Amount = 0.0
    """Amount by which the reward falls, linearly over the last `overlong_tokens` sampled tokens before
    limits.max_tokens (DAPO's soft overlong punishment, arXiv 2503.14476)."""
    overlong_tokens: Annotated[int, Meta(ge=0)] = 0
    """Sampled tokens before limits.max_tokens over which `overlong_penalty` rises to its amount."""
    todo_penalty: Amount = 0.0
    """Amount by which the reward falls when every entry of the attempt's last to-do list is left open; a share of open
    entries costs that share."""
    broken_call_penalty: Amount = 0.0
    """Amount by which the reward falls when every call of the attempt is broken; a share costs that share."""

    def __post_init__(self) -> None:
        if self.overlong_penalty and not self.overlong_tokens:
            raise ValueError("overlong_penalty needs overlong_tokens of at least 1, got 0")


UNPRICED = Shaped()
"""Nothing but the verdict and the rubric counts."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a reward: the attempt, its verdict, and the prices of the configuration."""

    trajectory: Trajectory
    verdict: str
    """``passed``, ``failed``, ``cheating`` or ``candidate_crash``."""
    passed: bool
    tests: tuple[TestOutcome, ...]
    value: float | None = None
    """The number of a reward file or a checker; None where tests decide."""
    lowest: float = 0.0
    """The smallest `value` that the task gives: what an attempt earns that ends in no honest way."""
    refused: bool = False
    """Whether the judge refused to read the output of the tests."""
    steps: tuple[StepScore, ...] = ()
    """The verdicts on the steps, where the task has some; `value` is the sum of their shares."""
    suspicions: tuple[str, ...]
    rubric: RubricScore | None = None
    """The answers of a rubric judge; None without one."""
    tokens: int
    """Sampled tokens of all turns."""
    kinds: TokenKinds | None = None
    """The sampled tokens of all turns by kind; None where a turn has no count, as in older records."""
    calls: int
    turns: int
    prices: Mapping[str, float]
    """rubric_weight and max_tokens, of `[judge]` and `[limits]`."""


Given = float | TurnRewards
"""A finite number for one attempt, or one for the attempt and one for each of its turns."""

Reward = Callable[[Judged], Given | Awaitable[Given | None] | None]
"""The reward of one attempt; a plugin may also take `options`. None leaves the attempt out of its group. An exception,
a time limit or another value leaves it out as well (`reward_error`)."""

REWARDS: Registry[Reward] = Registry("rewards", {"shaped": "headrace.algorithms.rewards:shaped"}, needs=("__call__",))


def shaped(judged: Judged, options: Shaped = UNPRICED) -> float:
    """The built-in reward: 1 or 0 for the verdict, minus length_penalty x C_{k,q}(effort), minus the penalties of an
    overlong attempt, of open to-dos, broken calls and refused output, plus rubric_weight x the rubric's value.

    Every end of an attempt pays the same penalties, so no end but success is worth more than an honest failure.
    """
    return sum(shaped_parts(judged, options).values())


def shaped_parts(judged: Judged, options: Shaped = UNPRICED) -> dict[str, float]:
    """The parts of the built-in reward by name; each step of a task with steps is one. The rubric takes from every
    attempt and gives to honest ones alone."""
    prices = judged.prices
    verdict = earned(judged)
    parts = {"verdict": verdict}
    if judged.steps and judged.verdict in ("passed", "failed"):
        parts = {f"step {step.name}": step.share for step in judged.steps}
    if options.length_penalty:
        spent = effort(judged, options)
        priced = verdict - options.length_penalty * concave(spent, options.length_k, options.length_q)
        if priced != verdict:
            parts["effort"] = priced - verdict
    over = overlong(judged.tokens, int(prices.get("max_tokens", 0)), options.overlong_tokens)
    for name, penalty, share in (
        ("overlong", options.overlong_penalty, over),
        ("todo", options.todo_penalty, open_todos(judged.trajectory)),
        ("broken_call", options.broken_call_penalty, broken_calls(judged.trajectory)),
    ):
        if penalty and share:
            parts[name] = -penalty * share
    if judged.refused:
        parts["refused"] = -REFUSED
    honest = judged.verdict in ("passed", "failed") and not judged.refused
    weight = float(prices.get("rubric_weight", 0.0))
    if weight and judged.rubric is not None:
        gain = weight * judged.rubric.value
        parts["rubric"] = gain if honest else min(0.0, gain)
    return parts


def earned(judged: Judged) -> float:
    """1 for a pass; the number of a reward file or a checker where there is one and the attempt is honest; else the
    least that the task gives."""
    if judged.value is not None and judged.verdict in ("passed", "failed"):
        return judged.value
    return 1.0 if judged.passed else judged.lowest


def open_todos(trajectory: Trajectory) -> float:
    """The share of entries that are not done in the last to-do list that the tool took; 0 without a list."""
    share = 0.0
    for turn in trajectory.turns:
        taken = {result.call_id for result in turn.results if result.ok}
        for call in turn.calls:
            if call.name == "todo" and call.id in taken:
                marks = [line.strip()[:3] for line in call.arguments["items"].split("\n") if line.strip()]
                share = sum(mark != "[x]" for mark in marks) / len(marks) if marks else 0.0
    return share


def broken_calls(trajectory: Trajectory) -> float:
    """The share of calls that could not be read; a turn without any call counts as one."""
    calls = [call for turn in trajectory.turns for call in turn.calls]
    return sum(bool(call.error) for call in calls) / len(calls) if calls else 0.0


def concave(x: float, k: float, q: float) -> float:
    """C_{k,q}(x) for x >= 0, k > 0, q >= 0. ValueError outside."""
    if x < 0.0 or k <= 0.0 or q < 0.0:
        raise ValueError(f"concave penalty needs x >= 0, k > 0, q >= 0, got x={x}, k={k}, q={q}")
    if q == 1.0:
        return math.log1p(k * x) / k
    return math.expm1((1.0 - q) * math.log1p(k * x)) / (k * (1.0 - q))


def overlong(tokens: int, most: int, last: int) -> float:
    """0 up to `most` - `last` sampled tokens, 1 from `most` on, linear between them; 0 where `last` is 0 (DAPO's soft
    overlong punishment, arXiv 2503.14476)."""
    return min(1.0, max(0.0, (tokens - (most - last)) / last)) if last else 0.0


def effort(judged: Judged, options: Shaped = UNPRICED) -> float:
    """x of the penalty: the attempt's tokens by kind, calls and turns, each times its weight (``length_...``).

    ValueError where the kinds of tokens have different weights and the record does not count them.
    """
    kinds = judged.kinds
    thinking, calls, text = options.length_thinking_tokens, options.length_call_tokens, options.length_text_tokens
    if kinds is not None:
        tokens = thinking * kinds.thinking + calls * kinds.calls + text * (judged.tokens - kinds.thinking - kinds.calls)
    elif thinking == calls == text:
        tokens = text * judged.tokens
    else:
        raise ValueError(
            f"{judged.trajectory.id} does not count its tokens by kind; set length_thinking_tokens, length_call_tokens "
            "and length_text_tokens to one value"
        )
    return tokens + options.length_calls * judged.calls + options.length_turns * judged.turns
