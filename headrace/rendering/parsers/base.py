"""The base of all wire syntaxes: a parser from a completion's text to thinking, content and tool calls.

Four rules hold in every syntax. A call that the text does not close is an error and never runs. JSON is decoded from
its opening marker on; its closing marker is never searched, because a string may contain it. Thinking is split off
first, so a call that is only mentioned there does not run; the caller says whether the prompt had opened the thinking.
A value keeps the type that its tool's schema names: a string stays a string, whatever it looks like.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

Types = Mapping[str, Mapping[str, Any]]
"""Tool name to the properties of its JSON Schema: argument name to schema."""

_JSON = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not a call of the syntax; the message is what the policy reads."""


class WrittenCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a completion. `error` is set when it is malformed; then `name` may be empty."""

    name: str = ""
    arguments: dict[str, Any] = {}
    error: str = ""
    wire_id: str = ""
    """The id that the model wrote itself, in syntaxes that have one."""


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


class Syntax:
    """One wire syntax. Subclasses set the constants and define `find`."""

    name: ClassVar[str]
    """As in ``[policy] renderer``."""
    stops: ClassVar[tuple[str, ...]]
    """Tokens that end a turn in this syntax, as far as a tokenizer has them."""
    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a message in the template but that no model samples as its stop."""
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def wire_id(self, name: str, index: int, written: str = "") -> str:
        """The id under which a call stands in the messages of a template. index: of the call in its segment; written:
        the model's own id, which syntaxes that show ids use if it is well formed."""
        return f"call_{index}"

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """The calls of a text without its thinking, in order."""
        raise NotImplementedError

    def read(self, text: str, types: Types, *, opened: bool = False) -> Completion:
        """A completion without its stop token. opened: the prompt ended inside the thinking."""
        thinking, rest = self.split_thinking(text, opened)
        before = len(text) - len(rest)
        parts = [Part("thinking", 0, before)] if before else []
        content: list[str] = []
        calls: list[WrittenCall] = []
        at = 0
        for start, end, call in self.find(rest, types):
            content.append(rest[at:start])
            if end > at:  # several calls may share one span
                parts.append(Part("call", before + max(at, start), before + end))
            at = max(at, end)
            calls.append(call)
        return Completion(
            thinking=thinking, content="".join(content) + rest[at:], calls=tuple(calls), parts=tuple(parts)
        )

    def split_thinking(self, text: str, opened: bool) -> tuple[str, str]:
        """Thinking without its markers, and the rest, with which the text ends. Thinking that is never closed is all
        of the text."""
        begin, end = self.thinking
        if text.lstrip().startswith(begin):
            text, opened = text.lstrip()[len(begin) :], True
        if not opened:
            return "", text
        thinking, _, rest = text.partition(end)
        return thinking.strip(), rest


def skip_space(text: str, at: int) -> int:
    """The first position from `at` that is not white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


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
