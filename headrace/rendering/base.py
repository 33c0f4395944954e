"""The renderer protocol: it converts one policy's conversations to token ids, and sampled ids to tool calls.

A segment's context is a prompt, then turn by turn the sampled ids and a delta. A renderer encodes text from outside
(task, results, summary request) once and never encodes sampled ids again. Its results depend on its arguments alone, so
a resumed episode gets the same ids.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.messages.rollout import TokenKinds, ToolCall, ToolResult
from headrace.rendering.tokenizer import Tokenizer

Call = tuple[str, dict[str, str]]
"""A call that a script makes: the tool's name and its arguments."""


class RendererError(HeadraceError, exit_status=WRONG_INPUT):
    """This checkpoint's format cannot be used; the text names the missing part and the setting to change."""


class NoStopToken(RendererError):
    """The chat template ends a turn with none of the policy's stop tokens."""


class Exchange(Protocol):
    """A turn of the history as a renderer reads it: its calls, and their results in call order. A Turn is one."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """As `Renderer.parse` gave them."""

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """One per call."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """An Exchange that was not sampled, of a trace or a check."""

    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled turn in its parts."""

    calls: tuple[ToolCall, ...]
    """Never empty: a turn without a call is one call with an `error` that says so. Ids number the calls of the turn."""
    text: str = ""
    """All text that is neither thinking nor a call."""
    thinking: str = ""
    kinds: TokenKinds | UnsetType = UNSET
    """The sampled tokens by kind; unset from a renderer that does not count them."""


class Renderer(Protocol):
    """The format of one policy: syntax and tokenizer."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """Sampling ends at any of these ids; the id belongs to the turn."""
    bundle: str
    """sha256 of the renderer's bundle; empty for a renderer of scripted policies without a bundle."""
    detailed_results: bool
    """Whether results contain the messages of failed tests; the tiny policy was not trained on these."""

    @property
    def parallel(self) -> bool:
        """Whether one turn may hold several calls."""

    def prompt(self, task_prompt: str, summary: Sequence[int] = ()) -> list[int]:
        """The start of a segment, up to the first turn. summary: ids that the policy wrote at the last one's end."""

    def delta(
        self, history: Sequence[Exchange], *, stopped: int | None, summary: bool = False, task: str = ""
    ) -> list[int]:
        """The ids after the last turn of the history: its end, its results, and the opening of the next turn.

        history: the turns of this segment. stopped: the stop id that ended the last one, None when it was cut at its
        token limit. summary: ask for a summary instead of a turn. task: the user's next message, after the results.
        """

    def parse(self, ids: Sequence[int], *, prompt: Sequence[int] = ()) -> Parsed:
        """Parse a sampled turn. prompt: the ids before the turn; their end shows whether the thinking is already
        open."""

    def turn(self, calls: Sequence[Call], thought: str = "", *, before: int = 0) -> list[int]:
        """A turn as the policy should write it, its stop id included: for scripts and traces.

        before: calls made earlier in the segment, which some formats number.
        """
