"""The values that a sealed test observed, as text that another process can compare.

Candidate and hidden tests share a process, so everything in it can be read or forged there. A sealed test
(tasks/sealing.py) therefore holds no expectation: where the original asserts that a value equals a literal, it passes
the value to `observe`, and the judge compares it outside. Reporting the right value requires knowing it.

Values are sent as tagged JSON, which keeps 1, 1.0 and "1" distinct; the judge compares them with Python's own ``==``.
An instance of a subclass counts as one of its built-in base; any other object is opaque and equals nothing.
"""

import json
from typing import Any

LIMIT = 1 << 20
"""Characters of all observations of a run."""
_DEEP = 40


class Observations:
    """Collects the observations of the sealed tests of one process."""

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
        """The observations since the last call."""
        seen, self._seen = self._seen, []
        return seen


def encode(number: int, values: tuple[object, ...]) -> str:
    """One observation as text."""
    return json.dumps([number, _tagged(values, 0)])


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
