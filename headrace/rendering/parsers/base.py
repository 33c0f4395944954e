"""The base of all wire syntaxes: a parser from a completion's text to thinking, content and tool calls.

Four rules hold in every syntax. A call that the text does not close is an error and never runs. JSON is decoded from
its opening marker on; its closing marker is never searched, because a string may contain it. A call that thinking
mentions does not run, wherever the thinking stands; the caller says whether the prompt had opened it. A value keeps the
type that its tool's schema names: a string stays a string, whatever it looks like.

Any text gives a completion. A parser may raise: `Syntax.read` is the one place where that becomes an error that the
policy reads. Each step of a parser takes time in proportion to the text at most, and the numbers of calls and of
blocks of thinking are bounded, so a whole turn does too.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from headrace.rendering.parsers.values import Malformed, WrittenCall, malformed, recorded

__all__ = [
    "Completion", "Malformed", "Part", "Span", "Syntax", "Types", "WrittenCall", "after", "between_tokens", "call_of",
    "coerce", "json_closing", "json_object", "json_value", "skip_space", "unfinished", "with_section",
]  # fmt: skip

MOST_CALLS = 64
"""Calls that are read in one turn. The text behind them is content, and one more call says so."""
MOST_BLOCKS = 16
"""Blocks of thinking in one turn. Behind them all text is thinking."""

Types = Mapping[str, Mapping[str, Any]]
"""Tool name to the properties of its JSON Schema: argument name to schema."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


_JSON = json.JSONDecoder(strict=False, object_pairs_hook=_object)
_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*+("?)', re.S)
"""A bracket, or a string, whose group is its closing quote."""


class Span(NamedTuple):
    """Characters start..end-1 of a text are this call; the text outside of all spans is content."""

    start: int
    end: int
    call: WrittenCall


class Part(NamedTuple):
    """Characters start..end-1 of a completion are thinking or calls, markers included."""

    kind: Literal["thinking", "call"]
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion in its parts."""

    thinking: str = ""
    content: str = ""
    calls: tuple[WrittenCall, ...] = ()
    parts: tuple[Part, ...] = ()
    """Where thinking and calls stand in the text, in order and without overlap; the rest is content."""
    before: tuple[int, ...] = ()
    """Characters of content before each call."""
    spans: tuple[tuple[int, int], ...] = ()
    """Where each call begins and ends in the text."""

    @property
    def texts(self) -> tuple[str, str]:
        """The content before the first call without an error, and the content behind it."""
        first = next((at for at, call in zip(self.before, self.calls, strict=True) if not call.error), None)
        return self.content[:first].strip(), self.content[first:].strip() if first is not None else ""


class Syntax:
    """One wire syntax. Subclasses set the constants and define `find`."""

    name: ClassVar[str]
    """As in ``[policy] renderer``."""
    stops: ClassVar[tuple[str, ...]]
    """Tokens that end a turn in this syntax, as far as a tokenizer has them."""
    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a message in the template but that no model samples as its stop."""
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts with which a call, or what stands around calls, begins: until the call is there they are no content."""

    def wire_id(self, name: str, index: int, written: str = "") -> str:
        """The id under which a call stands in the messages of a template. index: of the call in its segment; written:
        the model's own id, which syntaxes that show ids use if it is well formed."""
        return f"call_{index}"

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """The calls of a text, in order; it may raise. The text may hold blocks of thinking: `read` takes no call that
        begins in one, and searches again behind it."""
        raise NotImplementedError

    def decided(self, text: str) -> int:
        """The number of characters of an unfinished turn that can be read at all, whatever follows."""
        return len(text)

    def undecided(self, content: str) -> int:
        """Where the content behind all calls of an unfinished turn may become something else."""
        return min((at for mark in self.marks if (at := content.find(mark)) >= 0), default=len(content))

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """For a text that begins with a call and ends in it: the number of characters that hold whatever follows, and
        the text that would end value and call behind them, empty unless they end in a value of type string. None for a
        call that nothing can finish."""
        return None

    def read(self, text: str, types: Types, *, opened: bool = False) -> Completion:
        """A completion without its stop token. opened: the prompt ended inside the thinking."""
        try:
            completion = self.completion(text, types, opened)
        except Exception as error:
            problem = malformed(f"the turn cannot be read ({type(error).__name__}: {error})")
            return Completion(content=text, calls=(problem,), before=(len(text),), spans=((0, len(text)),))
        calls = completion.calls[:MOST_CALLS]
        if len(completion.calls) > MOST_CALLS:
            calls = (*calls, malformed(f"a turn has at most {MOST_CALLS} calls; write the others in the next turn"))
        return msgspec.structs.replace(completion, calls=tuple(map(recorded, calls)))

    def completion(self, text: str, types: Types, opened: bool) -> Completion:
        """A completion whose values are not checked. It may have one call more than `MOST_CALLS`."""
        thinking: list[str] = []
        content: list[str] = []
        calls: list[WrittenCall] = []
        before_calls: list[int] = []
        spans: list[tuple[int, int]] = []
        parts: list[Part] = []
        at = 0
        block = self._thinking(text, 0)
        if opened and (block is None or text[: block[0]].strip()):
            block = (0, 0, self.thinking[1])
        while block is not None or at < len(text):
            begin = block[0] if block is not None else len(text)
            stop = at
            for start, end, call in self.find(text[at:], types) if begin > at else ():
                start, end = at + start, at + end
                if start >= begin or len(calls) > MOST_CALLS:
                    break
                content.append(text[stop : max(stop, start)])
                if end > stop:  # several calls may share one span
                    parts.append(Part("call", max(stop, start), end))
                stop = max(stop, end)
                calls.append(call)
                before_calls.append(sum(map(len, content)))
                spans.append((start, stop))
                if stop > begin:  # the marker of thinking stands in the call
                    block = self._thinking(text, stop)
                    begin = block[0] if block is not None else len(text)
            before = not thinking and not text[:begin].strip()  # blanks before the first block are no content
            if block is None:
                content.append(text[stop:begin])
                break
            content.append("" if before else text[stop:begin])
            closed = text.find(block[2], block[1]) if len(thinking) < MOST_BLOCKS else -1
            inside, at = (closed, closed + len(block[2])) if closed >= 0 else (len(text), len(text))
            thinking.append(text[block[1] : inside].strip())
            if at:
                parts.append(Part("thinking", 0 if before else begin, at))
            block = self._thinking(text, at) if at < len(text) else None
        return Completion(
            thinking="\n".join(filter(None, thinking)),
            content="".join(content),
            calls=tuple(calls),
            parts=tuple(parts),
            before=tuple(before_calls),
            spans=tuple(spans),
        )

    def _thinking(self, text: str, at: int) -> tuple[int, int, str] | None:
        """The next block of thinking: where its marker begins and ends, and the marker that closes it."""
        begin = text.find(self.thinking[0], at)
        return (begin, begin + len(self.thinking[0]), self.thinking[1]) if begin >= 0 else None


def skip_space(text: str, at: int) -> int:
    """The first position from `at` that is not white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def unfinished(text: str, marks: Sequence[str]) -> int:
    """The length of the end of a text with which one of the marks may begin."""
    longest = max(map(len, marks), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


def json_value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends. Malformed."""
    try:
        return _JSON.raw_decode(text, skip_space(text, at))
    except ValueError as error:
        raise Malformed(f"the arguments are not JSON ({error})") from None
    except RecursionError:
        raise Malformed("the arguments are nested too deeply") from None


def json_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """`json_value` that is an object. Malformed."""
    value, end = json_value(text, at)
    if not isinstance(value, dict):
        raise Malformed(f"the arguments are not a JSON object but {type(value).__name__}")
    return value, end


def json_closing(text: str, at: int, end: str = "") -> tuple[int, str] | None:
    """`Syntax.closing` of a call whose JSON begins at `at` or behind it. end: what a call has behind its JSON."""
    closers: list[str] = []
    for match in _STRUCTURE.finditer(text, at):
        token = match.group()
        if token in "{[":
            closers.append("}" if token == "{" else "]")
        elif token in "}]":
            if not closers or closers.pop() != token or not closers:
                return None
        elif not match.group(1):
            inside = match.end() == len(text)  # otherwise it ends in the middle of an escape
            return len(text), "".join(['"', *reversed(closers), end]) if inside else ""
    return len(text), ""


def call_of(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of ``{"name": ..., "arguments": {...}}``; arguments may be JSON in a string. Malformed."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Malformed('a call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = json_value(arguments, 0)
    if not isinstance(arguments, dict):
        raise Malformed("the arguments are not a JSON object")
    return value["name"], arguments


def after(text: str, at: int, closing: str) -> int:
    """The end of `closing`, which must follow at `at`, white space aside. Malformed otherwise."""
    at = skip_space(text, at)
    if not text.startswith(closing, at):
        raise Malformed(f"the call is not closed by {closing}")
    return at + len(closing)


def between_tokens(
    text: str, begin: str, end: str, section: tuple[str, str], read: Callable[[str, int], tuple[WrittenCall, int]]
) -> Iterator[Span]:
    """The calls that stand between two tokens, in order; a call that cannot be read ends at its end token.

    section: the markers around all calls of a turn. read: a call from the position behind `begin`, and where it ends;
    it may raise Malformed.
    """
    at = 0
    while (start := text.find(begin, at)) >= 0:
        try:
            call, stop = read(text, start + len(begin))
        except Malformed as error:
            closed = text.find(end, start)
            stop = len(text) if closed < 0 else closed + len(end)
            call = WrittenCall(error=str(error))
        span = with_section(text, Span(start, stop, call), at, *section)
        at = span.end
        yield span


def with_section(text: str, span: Span, since: int, begin: str, end: str) -> Span:
    """A span widened over the section markers that stand directly around it. since: where the last span ended."""
    start, stop = span.start, span.end
    at = text.rfind(begin, since, start)
    if at >= 0 and not text[at + len(begin) : start].strip():
        start = at
    behind = skip_space(text, stop)
    if text.startswith(end, behind):
        stop = behind + len(end)
    return Span(start, stop, span.call)


def coerce(value: str, schema: Any) -> Any:
    """A value that was written as plain text, in the type that its schema names; the text itself if it has none."""
    types = _types(schema)
    word = value.strip()
    if "null" in types and word == "null":
        return None
    if "string" in types:
        return value
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return value


def _types(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    types = schema.get("type")
    if types is None:
        types = [option.get("type") for option in schema.get("anyOf", ()) if isinstance(option, dict)]
    return types if isinstance(types, list) else [types]
