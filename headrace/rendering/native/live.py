"""Reads a turn while it is sampled: the parts that hold whatever follows.

Idea: the whole text so far is read by the same parser as a finished turn. The reader holds back whatever may still
change: an unfinished character, the beginning of a marker, white space at the end, and a call until something follows
it. The arguments of a call grow in a string: the text is read twice, with the string and the call ended where the text
ends, and ended one letter behind it. The common beginning of both readings holds.

Each reading takes time in proportion to the text, so the caller decides how often to read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.rendering.parsers.base import MOST_CALLS, Completion, Syntax, Types, WrittenCall, unfinished
from headrace.rendering.parsers.values import recorded
from headrace.rendering.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"


class LiveCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as far as it is known."""

    at: int
    """Its place among all calls of the turn, malformed ones included."""
    name: str
    arguments: str
    """The beginning of the JSON that `arguments_json` makes of the finished call."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an unfinished turn that hold whatever follows."""

    thinking: str = ""
    text: str = ""
    """The content before the first call."""
    calls: tuple[LiveCall, ...] = ()


class LiveTurn:
    """Reads one turn again and again while it grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        syntax: Syntax,
        types: Types,
        stop_ids: Sequence[int],
        opened: bool,
        usable: Callable[[WrittenCall], WrittenCall],
    ) -> None:
        """types: as of `Syntax.find`. opened: the prompt ended inside the thinking. usable: as calls are given to the
        client."""
        self._tokenizer, self._syntax, self._types = tokenizer, syntax, types
        self._stops, self._opened, self._usable = frozenset(stop_ids), opened, usable
        self._text = ""
        self._window = self._known = 0
        """`_text` decodes the first `_known` ids; ids from `_window` on are decoded again."""

    def read(self, ids: Sequence[int]) -> Settled:
        """The part that holds of a turn that begins with these ids: more ids than at the last call."""
        text = self._decoded(ids[:-1] if ids and ids[-1] in self._stops else ids)
        syntax = self._syntax
        marks = (*syntax.marks, *syntax.thinking)
        text = text[: len(text) - unfinished(text, marks)]
        text = text[: syntax.decided(text)]
        done = self._read(text)
        if done is None:
            return Settled()
        ended = [self._is_over(text, *place) for place in zip(done.calls, done.spans, strict=True)]
        calls = [
            LiveCall(at=at, name=call.name, arguments=arguments_json(call.arguments))
            for at, (call, over) in enumerate(zip(done.calls, ended, strict=True))
            if over and not call.error and all(ended[:at])
        ]
        content = done.content
        if calls:
            content = content[: done.before[calls[0].at]]
        elif not all(ended):
            content = content[: done.before[ended.index(False)]]
        else:
            behind = len(text) - done.parts[-1].end if done.parts else len(text)
            behind = min(behind, len(content))  # headers of messages are neither
            content = content[: len(content) - behind + syntax.undecided(content[len(content) - behind :])]
        if not all(ended):
            calls += self._growing(text, done, ended.index(False))
        return Settled(thinking=done.thinking, text=content.strip(), calls=tuple(calls[:MOST_CALLS]))

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of the ids, without a character at its end that is not finished."""
        before = self._tokenizer.decode(ids[self._window : self._known])
        now = self._tokenizer.decode(ids[self._window :])
        text = self._text + now[len(before) :]
        if now and not now.endswith(_UNKNOWN):
            self._text, self._window, self._known = text, self._known, len(ids)
        return text.rstrip(_UNKNOWN)

    def _is_over(self, text: str, call: WrittenCall, span: tuple[int, int]) -> bool:
        """Whether a call stays as it is. One that cannot be read yet may end behind what looks like its end."""
        start, end = span
        return bool(text[end:].strip()) and not (call.error and self._syntax.closing(text[start:], self._types))

    def _read(self, text: str) -> Completion | None:
        """None for a text at which the parser fails: then it is read at its end alone."""
        try:
            done = self._syntax.completion(text, self._types, self._opened)
        except Exception:
            return None
        return msgspec.structs.replace(done, calls=tuple(self._usable(recorded(call)) for call in done.calls))

    def _growing(self, text: str, done: Completion, first: int) -> list[LiveCall]:
        """The calls from the first unfinished one on, as far as their names and arguments hold."""
        start, _ = done.spans[first]
        length, closing = self._syntax.closing(text[start:], self._types) or (0, "")
        if not closing:
            return []
        head = text[: start + length]
        here, behind = self._read(head + closing), self._read(f"{head}x{closing}")
        if here is None or behind is None or not first < len(here.calls) == len(behind.calls):
            return []
        pairs = list(zip(here.calls, behind.calls, strict=True))[first:]
        (last, longer), earlier = pairs[-1], pairs[:-1]
        if any(a != b for a, b in earlier) or last.name != longer.name or last == longer:
            return []
        if any(call.error for pair in pairs for call in pair):
            return []
        grown = [arguments_json(a.arguments) for a, _ in earlier]
        grown.append(_common(arguments_json(last.arguments), arguments_json(longer.arguments)))
        return [
            LiveCall(at=at, name=call.name, arguments=text)
            for at, (call, _), text in zip(range(first, len(here.calls)), pairs, grown, strict=True)
        ]


def _common(one: str, other: str) -> str:
    """The common beginning of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return one[:low]


def arguments_json(arguments: Mapping[str, Any]) -> str:
    """The arguments of a call as a client gets them."""
    return json.dumps(arguments, ensure_ascii=False)
