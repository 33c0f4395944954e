"""Calls as nested tags, one per argument: the common base of Qwen XML, GLM, DSML and MiniMax.

A value ends at the first closing tag that another argument or the call's end follows, because code may contain the
closing tag itself. Models sometimes omit the closing tag of the last argument; then the value ends where the call does,
provided that nothing follows the call.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace.rendering.parsers.base import Span, Types, WrittenCall, coerce, skip_space, unfinished

Value = Callable[[str, "re.Match[str]", Any], Any]
"""(text of a value, match of its opening tag, schema of the argument) -> the value."""


class Tags(NamedTuple):
    """Regular expressions of one dialect. `call` and `parameter` have a group ``name``."""

    call: re.Pattern[str]
    parameter: re.Pattern[str]
    parameter_end: re.Pattern[str]
    """With a look-ahead at what must follow."""
    end: re.Pattern[str]
    section: re.Pattern[str]
    """Stands before calls and is no content."""
    section_end: re.Pattern[str]
    closers: tuple[str, ...]
    """Texts with which a value or its call may end."""
    closing: str
    """Ends a value and its call."""


def tags(
    call: str,
    parameter: str,
    parameter_end: str,
    end: str,
    section: str = "",
    section_end: str = "",
    *,
    closers: tuple[str, ...],
    closing: str,
) -> Tags:
    """Compile a dialect; the positional arguments are regular expressions, an empty section matches nothing."""
    plain = parameter.replace("(?P<name>", "(?:").replace("(?P<string>", "(?:")
    return Tags(
        re.compile(call),
        re.compile(parameter, re.S),
        re.compile(rf"{parameter_end}(?=\s*(?:{plain}|{end}))", re.S),
        re.compile(end),
        re.compile(section or r"(?!)"),
        re.compile(section_end or r"(?!)"),
        closers,
        closing,
    )


def plain_value(text: str, opening: re.Match[str], schema: Any) -> Any:
    """The text as its schema says."""
    return coerce(text, schema)


def without_frame_newlines(text: str, opening: re.Match[str], schema: Any) -> Any:
    """Without the one newline on each side that belongs to the tags; indentation stays."""
    return coerce(text.removeprefix("\n").removesuffix("\n"), schema)


def find(text: str, types: Types, dialect: Tags, value: Value = plain_value) -> Iterator[Span]:
    """The calls of a text in order."""
    at = 0
    while match := dialect.call.search(text, at):
        name, position = match.group("name").strip(), match.end()
        call = WrittenCall(name=name)
        if not match.group().endswith("/>"):
            call, position = _arguments(text, position, name, types.get(name, {}), dialect, value)
        start = _section_start(text, dialect, at, match.start())
        behind = dialect.section_end.match(text, skip_space(text, position))
        at = behind.end() if behind else position
        yield Span(start, at, call)


def closing(text: str, types: Types, dialect: Tags) -> tuple[int, str] | None:
    """`Syntax.closing` of a dialect. A value of another type than string is held back: it is read as a whole."""
    call = dialect.call.search(text)
    if call is None:
        return None
    at, schemas = call.end(), types.get(call.group("name").strip(), {})
    while opening := dialect.parameter.match(text, skip_space(text, at)):
        if ended := dialect.parameter_end.search(text, opening.end()):
            at = ended.end()
            continue
        string = opening.groupdict().get("string")
        schema = schemas.get(opening.group("name").strip())
        if string == "false" or (string is None and not (isinstance(schema, dict) and schema.get("type") == "string")):
            return None
        start = opening.end()
        places = [at for closer in dialect.closers if (at := text.find(closer, start)) >= 0]
        return min(places, default=max(start, len(text) - unfinished(text, dialect.closers))), dialect.closing
    return None


def _arguments(
    text: str, at: int, name: str, schemas: Mapping[str, Any], dialect: Tags, value: Value
) -> tuple[WrittenCall, int]:
    """The call whose opening tag ends at `at`, and where it ends."""
    arguments: dict[str, Any] = {}
    while True:
        at = skip_space(text, at)
        if end := dialect.end.match(text, at):
            return WrittenCall(name=name, arguments=arguments), end.end()
        opening = dialect.parameter.match(text, at)
        if opening is None:
            closing = dialect.end.search(text, at)
            error = f"{name}: expected an argument or the call's end"
            return WrittenCall(error=error), closing.end() if closing else len(text)
        argument = opening.group("name").strip()
        if closing := dialect.parameter_end.search(text, opening.end()):
            at = closing.end()
        elif closing := _last_end(text, opening.end(), dialect):
            at = closing.start()
        else:
            return WrittenCall(error=f"{name}: the argument {argument} is not closed"), len(text)
        if argument in arguments:
            error = f"{name}: the argument {argument} stands twice"
            closing = dialect.end.search(text, at)
            return WrittenCall(error=error), closing.end() if closing else len(text)
        arguments[argument] = value(text[opening.end() : closing.start()], opening, schemas.get(argument))


def _section_start(text: str, dialect: Tags, since: int, start: int) -> int:
    """Where the section marker directly before `start` begins, else `start`."""
    last = _last(dialect.section.finditer(text, since, start))
    return last.start() if last is not None and not text[last.end() : start].strip() else start


def _last_end(text: str, at: int, dialect: Tags) -> re.Match[str] | None:
    """The call's end from `at` on behind which the text ends too."""
    last = _last(dialect.end.finditer(text, at))
    behind = text[last.end() :].strip() if last is not None else ""
    return last if not behind or dialect.section_end.fullmatch(behind) else None


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(matches, maxlen=1)), None)
