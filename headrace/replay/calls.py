"""Runs the tool calls of a trajectory again in a fresh sandbox and compares each answer with the recorded one.

The caller passes a function that runs a call in a sandbox; calls are sent one after the other in the recorded order.
That is equivalent to the original run, because only read-only calls of one turn ran in parallel.

Durations and addresses of objects differ from run to run without an error. They are replaced on both sides before the
comparison and counted by name, so that the reader knows what was not compared.
"""

import difflib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from headrace.messages.rollout import ToolCall, ToolResult, Trajectory, Turn

Runner = Callable[[ToolCall], Awaitable[ToolResult]]

NORMALISED: dict[str, re.Pattern[str]] = {
    "durations": re.compile(r"\b\d+\.\d+ ?(?:ms|s|seconds)\b"),
    "addresses": re.compile(r"\b0x[0-9a-f]{6,16}\b"),
}
"""Patterns that are replaced, by name: pytest's and unittest's times, and the addresses in reprs."""
DIFF_LINES = 40


class CallDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One call whose answer differs from the recorded one."""

    turn: int
    call: str
    tool: str
    ok: bool
    """As recorded."""
    ok_again: bool
    diff: tuple[str, ...]
    """Unified diff from the recorded to the new answer, at most `DIFF_LINES` lines."""


class CallsReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `headrace replay RUN --trajectory ID` prints."""

    trajectory: str
    calls: int
    equal: bool
    """Whether every answer and every prompt is equal, and, if the record has its digest, the workspace at the end."""
    differing: tuple[CallDifference, ...]
    normalised: dict[str, int]
    """Replacements in the recorded answers before they were compared: kind to number."""
    prompts_differ: tuple[int, ...] | None
    """Turns whose prompt ids or parsed calls differ when they are rendered again; null without a renderer bundle, and
    for an episode without tools."""
    workspace_equal: bool | None
    """Whether the digest of the whole workspace at the end is equal; null if the record has none."""
    backend: str


def normal(text: str, counts: Counter[str] | None = None) -> str:
    """A result without times and addresses. counts: receives the number of replacements by kind."""
    for name, pattern in NORMALISED.items():
        text, replaced = pattern.subn(f"<{name}>", text)
        if counts is not None and replaced:
            counts[name] += replaced
    return text


def same(recorded: ToolResult, again: ToolResult) -> bool:
    """Whether two answers are equal, apart from times and addresses."""
    old, new = ((normal(result.output), result.ok, result.truncated, result.retrieved) for result in (recorded, again))
    return old == new


async def rerun(
    trajectory: Trajectory,
    run: Runner,
    digest: Callable[[], Awaitable[str]],
    backend: str = "",
    prompts_differ: tuple[int, ...] | None = None,
) -> CallsReplay:
    """Send every answered call of a trajectory again. digest: returns the digest of the workspace; called after the
    last call. prompts_differ: as in `CallsReplay`."""
    differing: list[CallDifference] = []
    counts: Counter[str] = Counter()
    calls = 0
    for turn, call, recorded in in_order(trajectory.turns):
        calls += 1
        again = await run(call)
        old, new = (_shown(result) for result in (recorded, again))
        normal(recorded.output, counts)
        if not same(recorded, again):
            differing.append(_difference(turn.index, call, recorded, again, old, new))
    recorded_digest = trajectory.digest_after
    workspace = (await digest()) == recorded_digest if recorded_digest else None
    return CallsReplay(
        trajectory=trajectory.id,
        calls=calls,
        equal=not differing and not prompts_differ and workspace is not False,
        differing=tuple(differing),
        normalised=dict(sorted(counts.items())),
        prompts_differ=prompts_differ,
        workspace_equal=workspace,
        backend=backend,
    )


def in_order(turns: Sequence[Turn], caller: str | UnsetType = UNSET) -> Iterator[tuple[Turn, ToolCall, ToolResult]]:
    """The answered calls in the order in which they ended: a child agent's calls before the call that ran it."""
    for turn in turns:
        if turn.caller == caller:
            for call, result in zip(turn.calls, turn.results, strict=False):  # the last turn may have no answers
                if caller is UNSET:
                    yield from in_order(turns, call.id)
                yield turn, call, result


def _shown(result: ToolResult) -> str:
    """A result as text: the output that the policy read, then the evidence of a search."""
    text = normal(result.output)
    if (evidence := result.retrieved) is None:
        return text
    return "\n".join((text, f"root {evidence.root}", f"model {evidence.model} {evidence.mode}", *evidence.chunks))


def _difference(
    turn: int, call: ToolCall, recorded: ToolResult, again: ToolResult, old: str, new: str
) -> CallDifference:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "recorded", "again", lineterm="", n=1))
    return CallDifference(
        turn=turn,
        call=call.id,
        tool=call.name,
        ok=recorded.ok,
        ok_again=again.ok,
        diff=tuple(lines[:DIFF_LINES]),
    )
