"""What the policy has before it: the ids of a segment, and when it is time for a summary.

A segment's context is the concatenation of what was appended and what was sampled, token for token. Once it has
grown to the task's limit the policy writes a summary and a new segment starts from the task and that summary; all
segments are one trajectory, and the reward reaches each of them.
"""

from collections.abc import Sequence

from headrace.messages.rollout import ToolResult, Turn
from headrace.policy.renderer import Renderer


class Context:
    """The running segment. `pending` holds results that the policy has not read yet."""

    def __init__(self, renderer: Renderer, prompt: str, limit: int) -> None:
        self._renderer, self._prompt, self._limit = renderer, prompt, limit
        self.segment = 0
        self.ids: list[int] = []
        self._summary: tuple[int, ...] = ()
        self._pending: Sequence[ToolResult] = ()
        self._closed = True

    def take(self, turn: Turn) -> None:
        """A turn was sampled, now or before a resume."""
        ids = [int(id) for id in turn.ids.tolist()]
        self.ids += [int(id) for id in turn.prompt_ids.tolist()] + ids
        self._closed = turn.stop == "stop"
        self._pending = ()
        if turn.kind == "summary":
            self.segment, self.ids, self._summary = self.segment + 1, [], tuple(ids)

    def answer(self, results: Sequence[ToolResult]) -> None:
        """The turn's calls were answered."""
        self._pending = results

    def next_ids(self) -> list[int]:
        """Ids to append before the next turn."""
        if not self.ids:
            return self._renderer.prompt(self._prompt, self._summary)
        return self._renderer.results(self._pending, self._closed)

    def summary_ids(self) -> list[int]:
        """Ids to append to ask for a summary instead; they carry the pending results too."""
        return self._renderer.summary_request(self._pending, self._closed)

    def full(self, more: Sequence[int]) -> bool:
        """Whether the segment with `more` appended has reached the limit."""
        return len(self.ids) + len(more) >= self._limit
