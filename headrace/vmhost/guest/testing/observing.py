"""What a sealed test saw, as text that another process can compare.

Candidate and hidden tests share a process, so whatever stands in it can be read or forged there. A sealed test
(tasks/sealing.py) therefore holds no expectation: where the original asserts that a value equals a literal, it hands
the value to `observe`, and the judge, outside, compares. Only who knows the right value can report it.

Values travel as tagged JSON, so that 1, 1.0 and "1" stay apart until Python's own ``==`` brings them together on the
other side. Subclasses count as what they are built on; anything else is opaque and equals nothing.
"""

import json
from typing import Any

LIMIT = 1 << 20
"""Characters of all observations of a run."""
_DEEP = 40


class Observations:
    """Collects what the sealed tests of one process see."""

    def __init__(self) -> None:
        self._seen: list[str] = []
        self._room = LIMIT

    def observe(self, number: int, *values: object) -> None:
        """Called by sealed tests, as ``__observe__``: a value, or two that should be equal."""
        text = encode(number, values)
        self._room -= len(text)
        if self._room >= 0:
            self._seen.append(text)

    def take(self) -> list[str]:
        """What was seen since the last call."""
        seen, self._seen = self._seen, []
        return seen


def encode(number: int, values: tuple[object, ...]) -> str:
    """One observation as text."""
    return json.dumps([number, _tagged(values, 0)])


def decode(text: str) -> tuple[int, object]:
    """Number and values. ValueError when the text is none that `encode` writes, or holds something opaque."""
    try:
        number, tagged = json.loads(text)
        if type(number) is not int:
            raise ValueError("no number")
        return number, _value(tagged, 0)
    except (TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _tagged(value: Any, depth: int) -> list[Any]:
    if depth > _DEEP:
        return ["?", "deep"]
    down = depth + 1
    for kind in type(value).__mro__:
        if value is None:
            return ["n"]
        if kind is bool:
            return ["b", bool(value)]
        if kind is int:
            return ["i", hex(value)]
        if kind is float:
            return ["f", float.__repr__(value)]
        if kind is str:
            return ["s", str.__str__(value)]
        if kind in (bytes, bytearray):
            return ["y", bytes(value).hex()]
        if kind in (list, tuple):
            return ["l" if kind is list else "t", [_tagged(item, down) for item in kind.__iter__(value)]]
        if kind in (set, frozenset):
            return ["e", [_tagged(item, down) for item in kind.__iter__(value)]]
        if kind is dict:
            return ["d", [[_tagged(k, down), _tagged(v, down)] for k, v in dict.items(value)]]
    return ["?", type(value).__name__]


def _value(tagged: Any, depth: int) -> object:
    if depth > _DEEP:
        raise ValueError("deep")
    kind, down = tagged[0], depth + 1
    if kind == "n":
        return None
    body = tagged[1]
    if kind == "b":
        return body is True
    if kind == "i":
        return int(body, 16)
    if kind == "f":
        return float(body)
    if kind == "s" and isinstance(body, str):
        return body
    if kind == "y":
        return bytes.fromhex(body)
    if kind == "d":
        return {_value(k, down): _value(v, down) for k, v in body}
    makers: dict[str, Any] = {"l": list, "t": tuple, "e": set}
    if kind in makers:
        return makers[kind]([_value(item, down) for item in body])
    raise ValueError(f"an opaque value: {body}")
