"""The policy's context: the token ids of the current segment, and the test whether it must be summarised.

A segment's context is the concatenation of appended and sampled ids, token for token. When it reaches the task's limit,
the policy writes a summary, and a new segment starts from the task's prompt and that summary. All segments belong to
one trajectory and get its reward.
"""

from collections.abc import Sequence

import msgspec

from headrace.messages.rollout import ToolResult, Turn
from headrace.rendering.base import Renderer


class Context:
    """The token ids and turns of the current segment."""

    def __init__(self, renderer: Renderer, prompt: str, limit: int) -> None:
        """prompt: the text of the first turn. limit: tokens after which the segment must be summarised."""
        self._renderer, self._prompt, self._limit = renderer, prompt, limit
        self.segment = 0
        self.ids: list[int] = []
        self._summary: tuple[int, ...] = ()
        self._turns: list[Turn] = []
        """Of this segment; only the last may lack its results."""

    def take(self, turn: Turn) -> None:
        """Append a turn that was sampled now or read from the log; a summary starts the next segment."""
        ids = [int(id) for id in turn.ids.tolist()]
        self.ids += [int(id) for id in turn.prompt_ids.tolist()] + ids
        self._turns.append(turn)
        if turn.kind == "summary":
            self.segment, self.ids, self._summary, self._turns = self.segment + 1, [], tuple(ids), []

    def answer(self, results: Sequence[ToolResult]) -> None:
        """Add the results of the last turn's calls."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], results=tuple(results))

    def next_ids(self) -> list[int]:
        """Ids to append before the next turn."""
        if not self.ids:
            return self._renderer.prompt(self._prompt, self._summary)
        return self._delta(summary=False)

    def summary_ids(self) -> list[int]:
        """Ids to append that ask for a summary; they include the results that the policy has not read yet."""
        return self._delta(summary=True)

    def _delta(self, *, summary: bool) -> list[int]:
        last = self._turns[-1]
        stopped = self.ids[-1] if last.stop == "stop" else None
        return self._renderer.delta(self._turns, stopped=stopped, summary=summary)

    def full(self, more: Sequence[int]) -> bool:
        """Whether the segment reaches the limit when `more` is appended."""
        return len(self.ids) + len(more) >= self._limit
