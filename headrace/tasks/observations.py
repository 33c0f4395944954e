"""The host's bounded parser of the values that sealed tests of a candidate observed.

The guest's half (vmhost/guest/testing/observing.py) writes each value as tagged JSON. The input is untrusted, because
the candidate shares the process that writes it. The parser therefore accepts exactly the format of the guest's half,
within bounds on depth, digits and hashed items, and raises ValueError for everything else. Python's other
errors (overflow, recursion, unhashable keys) cannot leave it.

Trade-off: a set or dict of more than `HASHED` items is refused, because a forged one may hold keys that all collide and
then costs quadratic time. Tests that compare larger ones keep their assertion unsealed.
"""

import json
import re
from typing import Any

DEPTH = 40
"""The most levels of nesting; the guest's half never writes more."""
HASHED = 4096
"""The most items of one set or dict."""
DIGITS = 1 << 14
"""The most hexadecimal digits of an integer."""

_INTEGER = re.compile(r"-?0x[0-9a-f]+")


def decode(text: str) -> tuple[int, object]:
    """The number of the comparison, and the values that it saw. ValueError when the text is none that the guest's half
    writes, is beyond a bound, or holds something opaque."""
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise ValueError("the observation is nested too deeply") from None
    if type(parsed) is not list or len(parsed) != 2 or type(parsed[0]) is not int:
        raise ValueError("expected an observation [number, value]")
    try:
        return parsed[0], _value(parsed[1], 0)
    except TypeError as error:  # a list as the key of a dict or the item of a set
        raise ValueError(str(error)) from None


def _value(tagged: Any, depth: int) -> object:
    if depth > DEPTH:
        raise ValueError(f"the observation is nested more than {DEPTH} levels deep")
    if tagged == ["n"]:
        return None
    if type(tagged) is not list or len(tagged) != 2:
        raise ValueError("expected a tagged value [tag, body]")
    tag, body = tagged
    match tag, body:
        case "b", bool():
            return body
        case "i", str():
            if len(body) > DIGITS or not _INTEGER.fullmatch(body):
                raise ValueError(f"expected a hexadecimal integer of at most {DIGITS} digits")
            return int(body, 16)
        case "f", str():
            return float(body)
        case "s", str():
            return body
        case "y", str():
            return bytes.fromhex(body)
        case "l", list():
            return [_value(item, depth + 1) for item in body]
        case "t", list():
            return tuple(_value(item, depth + 1) for item in body)
        case "e", list():
            _few(body)
            return {_value(item, depth + 1) for item in body}
        case "d", list():
            _few(body)
            if not all(type(pair) is list and len(pair) == 2 for pair in body):
                raise ValueError("expected the pairs of a dict")
            return {_value(key, depth + 1): _value(value, depth + 1) for key, value in body}
    raise ValueError("expected a value that can be compared; this one is opaque or has another form than its tag")


def _few(items: list[Any]) -> None:
    if len(items) > HASHED:
        raise ValueError(f"a set or dict of {len(items)} items; at most {HASHED} are compared")
