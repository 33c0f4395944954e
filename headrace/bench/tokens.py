"""Counts the tokens of one attempt by kind. Every token of every segment is counted once.

The kinds of sampled tokens are those that the policy's renderer counted from the sampled ids (`Turn.kinds`).
"""

from collections.abc import Sequence

import msgspec

from headrace.messages.rollout import Turn, kinds_of


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one attempt by kind. The four kinds add up to all tokens of all segments."""

    prompt: int = 0
    """Prompt tokens in front of the first turn of every segment: the task, the tools, and the last summary again."""
    observed: int = 0
    """Tokens of the calls' results, with their frames and the requests for summaries."""
    acting: int = 0
    """Sampled in turns with calls or text."""
    thinking: int | None = None
    """Of `acting`, with its markers. None where a turn does not count its tokens by kind, as in older records."""
    calls: int | None = None
    """Of `acting`, with their markers. None as above."""
    summary: int = 0
    """Sampled in summaries."""
    dropped: int = 0
    """Of all these, the tokens of ended segments that no later segment sees: all but the summaries."""

    @property
    def text(self) -> int | None:
        """Of `acting`, neither thinking nor calls: the final message, the stop tokens. None as above."""
        return None if self.thinking is None or self.calls is None else self.acting - self.thinking - self.calls

    @property
    def sampled(self) -> int:
        """All sampled tokens."""
        return self.acting + self.summary

    @property
    def total(self) -> int:
        """All tokens of all segments."""
        return self.prompt + self.observed + self.acting + self.summary


def tokens_of(turns: Sequence[Turn]) -> Tokens:
    """The tokens of an attempt."""
    kinds = {"prompt": 0, "observed": 0, "acting": 0, "summary": 0}
    last = turns[-1].segment if turns else 0
    dropped = 0
    for position, turn in enumerate(turns):
        opens = position == 0 or turns[position - 1].segment != turn.segment
        kinds["prompt" if opens else "observed"] += len(turn.prompt_ids)
        kinds["summary" if turn.kind == "summary" else "acting"] += len(turn.ids)
        if turn.segment != last:
            dropped += len(turn.prompt_ids) + (0 if turn.kind == "summary" else len(turn.ids))
    acting = kinds_of(turn for turn in turns if turn.kind != "summary")
    return Tokens(
        **kinds,
        thinking=acting.thinking if acting is not None else None,
        calls=acting.calls if acting is not None else None,
        dropped=dropped,
    )
