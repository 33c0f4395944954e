"""The policy's context: the token ids of the current segment, and the test whether it must be summarised.

A segment's context is the concatenation of appended and sampled ids, token for token. When it reaches the task's limit,
the policy writes a summary, and a new segment starts from the task's prompt and that summary. All segments belong to
one trajectory and get its reward.

In a task with steps a turn that ends a step is followed by the next step's prompt, as a message of the user. Later
segments start from that prompt.
"""

from collections.abc import Callable, Sequence

import msgspec

from headrace.harness.prompt import whole_prompt
from headrace.harness.tools.base import shortened
from headrace.messages.rollout import ToolResult, Turn
from headrace.rendering.base import Renderer


class Context:
    """The token ids and turns of the current segment."""

    def __init__(
        self,
        renderer: Renderer,
        prompt: str,
        limit: int,
        longest: int | None = None,
        *,
        system: str = "",
        later: Sequence[str] = (),
        fresh: Callable[[], int] | None = None,
    ) -> None:
        """prompt: the text of the first turn. limit: tokens after which the segment must be summarised. longest:
        tokens that a request for a summary may have; None sets no limit. system: the suite's instructions, which stand
        before the prompt of a segment. later: the prompts of the task's later steps. fresh: gives the number of a
        new segment where several agents share an attempt; None counts from 0."""
        self._renderer, self._prompt, self._limit, self._longest = renderer, prompt, limit, longest
        self._system, self._later = system, list(later)
        self._task = ""
        """The prompt of the step that begins after the last turn."""
        self.segment: int = fresh() if fresh is not None else 0
        self._fresh = fresh or (lambda: self.segment + 1)
        self.ids: list[int] = []
        self._summary: tuple[int, ...] = ()
        self._turns: list[Turn] = []
        """Of this segment; only the last may lack its results."""

    def take(self, turn: Turn) -> None:
        """Append a turn that was sampled now or read from the log; a summary starts the next segment."""
        ids = [int(id) for id in turn.ids.tolist()]
        self.ids += [int(id) for id in turn.prompt_ids.tolist()] + ids
        self._turns.append(turn)
        self._task = self._later.pop(0) if turn.finishes and self._later else ""
        if self._task:
            self._prompt = whole_prompt(self._system, self._task)
        if turn.kind == "summary":
            self.segment, self.ids, self._summary, self._turns = self._fresh(), [], tuple(ids), []

    def answer(self, results: Sequence[ToolResult]) -> None:
        """Add the results of the last turn's calls."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], results=tuple(results))

    def fitting(self, results: Sequence[ToolResult]) -> tuple[ToolResult, ...]:
        """The results of the last turn's calls, cut so far that a request for a summary is not too long.

        All are cut to one length, so that a short result stays complete next to a long one. The record has the cut
        results: a replay needs no limits to render the same ids.
        """
        whole = tuple(results)
        if self._longest is None or self._summary_fits(whole):
            return whole
        fits, too_long = 0, max(len(result.output) for result in whole) if whole else 0
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._summary_fits(_cut(whole, middle)):
                fits = middle
            else:
                too_long = middle
        return _cut(whole, fits)

    def _summary_fits(self, results: Sequence[ToolResult]) -> bool:
        turns = [*self._turns[:-1], msgspec.structs.replace(self._turns[-1], results=tuple(results))]
        return self._longest is None or len(self.ids) + len(self._delta(turns, summary=True)) <= self._longest

    def next_ids(self) -> list[int]:
        """Ids to append before the next turn."""
        if not self.ids:
            return self._renderer.prompt(self._prompt, self._summary)
        return self._delta(self._turns, summary=False)

    def summary_ids(self) -> list[int]:
        """Ids to append that ask for a summary; they include the results that the policy has not read yet."""
        return self._delta(self._turns, summary=True)

    def _delta(self, turns: Sequence[Turn], *, summary: bool) -> list[int]:
        stopped = self.ids[-1] if turns[-1].stop == "stop" else None
        if self._task and not summary:
            return self._renderer.delta(turns, stopped=stopped, task=self._task)
        return self._renderer.delta(turns, stopped=stopped, summary=summary)

    def full(self, more: Sequence[int]) -> bool:
        """Whether the segment reaches the limit when `more` is appended."""
        return len(self.ids) + len(more) >= self._limit


def _cut(results: Sequence[ToolResult], most: int) -> tuple[ToolResult, ...]:
    """The results with at most `most` characters of output each, and a line that says how many are cut."""
    return tuple(
        msgspec.structs.replace(result, output=shortened(result.output, most), truncated=True)
        if len(result.output) > most
        else result
        for result in results
    )
