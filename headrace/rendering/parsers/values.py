"""The one place where a parsed call becomes a record: names and arguments are JSON values that a message can carry.

A value that JSON does not have (bytes, a set, NaN, a number of more than 64 bits), half of a surrogate pair and deep
nesting make the call malformed: no tool runs, and the policy reads why. The two halves of a pair become their
character, as JSON joins them. The sampled ids are recorded beside the call, so nothing that the policy wrote is lost.
"""

import math
import re
from typing import Any

import msgspec

from headrace.errors import HeadraceError

MOST_DEPTH = 64
"""Lists and objects inside each other in one argument."""
_LONGEST = 500
"""Characters of an error."""
_HALF = re.compile("[\ud800-\udfff]")


class Malformed(HeadraceError):
    """The text is not a call of the syntax; the message is what the policy reads."""


class WrittenCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a completion. `error` is set when it is malformed; then `name` may be empty."""

    name: str = ""
    arguments: dict[str, Any] = {}
    error: str = ""
    wire_id: str = ""
    """The id that the model wrote itself, in syntaxes that have one."""


def recorded(call: WrittenCall) -> WrittenCall:
    """The call with JSON values alone, or one with the error that says which value is none."""
    if call.error:
        return malformed(call.error)
    try:
        name = _text(call.name, "the name of the call")
        arguments = {
            _text(key, "the name of an argument"): _argument(key, each) for key, each in call.arguments.items()
        }
        return WrittenCall(name=name, arguments=arguments, wire_id=_text(call.wire_id, "the id of the call"))
    except Malformed as error:
        return malformed(str(error))


def malformed(error: str) -> WrittenCall:
    """A call that does not run, with the reason as text that a message can carry."""
    text = error.encode("utf-8", "backslashreplace").decode()
    return WrittenCall(error=text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def _argument(name: Any, value: Any) -> Any:
    try:
        return _value(value, 0)
    except Malformed as error:
        raise Malformed(f"the argument {name!s:.80} {error}") from None


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is not text but {type(value).__name__}")
    try:
        return _joined(value)
    except Malformed as error:
        raise Malformed(f"{what} {error}") from None


def _joined(text: str) -> str:
    """The text with its surrogate pairs as characters. Malformed for half of a pair."""
    if text.isascii() or not _HALF.search(text):
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        half = _HALF.search(text)
        assert half is not None
        raise Malformed(
            f"holds \\u{ord(half.group()):04x}, which is half of a surrogate pair and no character"
        ) from None


def _value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _joined(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise Malformed("is an integer of more than 64 bits; write it as text")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Malformed(f"is {value}, which is no JSON number")
        return value
    if not isinstance(value, list | tuple | dict):
        raise Malformed(f"is no JSON value but {type(value).__name__}")
    if depth == MOST_DEPTH:
        raise Malformed(f"is nested deeper than {MOST_DEPTH} lists and objects")
    if isinstance(value, dict):
        return {_text(key, "has a key that"): _value(each, depth + 1) for key, each in value.items()}
    return [_value(each, depth + 1) for each in value]
