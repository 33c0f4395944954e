"""Suites made of others: mixes, and selections of tasks by their ids.

``mix/generated/train*3+sums*1`` holds three tasks of the first suite for each of the second. The order is a fixed
pattern: in every prefix each suite has its share, up to one task. A suite whose tasks are used up starts again; the mix
ends when every suite was used completely. `headrace tasks probe` writes selections.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

import msgspec

from headrace.messages.tasks import Oracle, Task, TaskRef
from headrace.tasks.base import Suite, Trust, UnknownSuite, trust_of

NAME = "mix"
_PART = re.compile(r"(?P<name>.+?)(?:\*(?P<weight>[1-9]\d{0,3}))?")


def parts(text: str) -> list[tuple[str, int]]:
    """The suites of a mix with their weights. UnknownSuite where the text is none."""
    parts = []
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UnknownSuite(f"expected a mix such as mix/generated/train*3+mine*1, got 'mix/{text}'")
        parts.append((match["name"], int(match["weight"] or 1)))
    return parts


class _Ids(Sequence[str]):
    """Ids ``<suite's number>~<id>`` in the order of the pattern, without making the list."""

    def __init__(self, ids: Sequence[Sequence[str]], weights: Sequence[int]) -> None:
        self._ids, self._weights = ids, weights
        self._pattern: list[tuple[int, int]] = []
        """One period: for each place the suite, and the number of its tasks that precede it in the period."""
        had = [0] * len(weights)
        total = sum(weights)
        for place in range(1, total + 1):
            behind = max(range(len(weights)), key=lambda n: (weights[n] * place / total - had[n], -n))
            self._pattern.append((behind, had[behind]))
            had[behind] += 1
        self._length = max(-(-len(each) // weight) for each, weight in zip(ids, weights, strict=True)) * total

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        period, place = divmod(index % self._length, len(self._pattern))
        suite, before = self._pattern[place]
        each = self._ids[suite]
        return f"{suite}~{each[(period * self._weights[suite] + before) % len(each)]}"


class _OfOthers:
    """Tasks of `parts`, each under this suite's name and with the part's prefix before its id."""

    name: str
    parts: Sequence[Suite]
    prefixes: Sequence[str]
    trust: Trust

    def find(self, id: str) -> tuple[Suite, str]:
        """The suite that a task comes from, and its id there. UnknownSuite."""
        raise NotImplementedError

    def task(self, id: str) -> Task:
        """The agent's side, under this suite's name."""
        suite, inner = self.find(id)
        return msgspec.structs.replace(suite.task(inner), ref=TaskRef(self.name, id))

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        suite, inner = self.find(id)
        return msgspec.structs.replace(suite.oracle(inner), ref=TaskRef(self.name, id))


class MixedSuite(_OfOthers):
    """The tasks of several suites."""

    def __init__(self, text: str, open_one: Callable[[str], Suite]) -> None:
        """UnknownSuite when a part is not a suite or has no tasks."""
        named = parts(text)
        self.name = f"{NAME}/{text}"
        self.parts = [open_one(name) for name, _ in named]
        empty = next((suite.name for suite in self.parts if not len(suite.ids())), "")
        if empty:
            raise UnknownSuite(f"{self.name}: suite {empty} has no tasks")
        self.prefixes = [f"{number}~" for number in range(len(self.parts))]
        self._ids = _Ids([suite.ids() for suite in self.parts], [weight for _, weight in named])
        self.trust = "log" if any(trust_of(suite) == "log" for suite in self.parts) else "report"

    def ids(self) -> Sequence[str]:
        """By weight."""
        return self._ids

    def find(self, id: str) -> tuple[Suite, str]:
        """The suite that a task comes from, and its id there. UnknownSuite."""
        number, tilde, inner = id.partition("~")
        digits = number.isascii() and number.isdigit() and len(number) < 7
        if not tilde or not digits or int(number) >= len(self.parts):
            raise UnknownSuite(f"{self.name} has no task {id!r:.200}")
        return self.parts[int(number)], inner


class SelectedSuite(_OfOthers):
    """Some tasks of another suite, under their ids and with their certificates there."""

    def __init__(self, name: str, ids: Sequence[str], of: Suite) -> None:
        self.name, self._ids, self._of = name, ids, of
        self.trust, self._known = trust_of(of), frozenset(ids)
        chosen: dict[str, tuple[Suite, list[str]]] = {}
        for id in ids:
            part, inner = self.find(id)
            chosen.setdefault(id.removesuffix(inner), (part, []))[1].append(inner)
        self.prefixes = list(chosen)
        self.parts = [_Chosen(part, of_part) for part, of_part in chosen.values()]

    def ids(self) -> Sequence[str]:
        """In the order in which they were written."""
        return self._ids

    def find(self, id: str) -> tuple[Suite, str]:
        """As in a mix."""
        if id not in self._known:
            raise UnknownSuite(f"{self.name} has no task {id!r:.200}")
        return self._of.find(id) if isinstance(self._of, _OfOthers) else (self._of, id)


class _Chosen:
    """A part of a selection: the other suite under its own name, with the chosen tasks alone."""

    def __init__(self, suite: Suite, ids: Sequence[str]) -> None:
        self.name, self._suite, self._ids = suite.name, suite, ids
        self.trust = trust_of(suite)
        self.source = str(getattr(suite, "source", ""))
        self.sample = tuple(dict.fromkeys(map(getattr(suite, "covered_by", str), ids)))

    def ids(self) -> Sequence[str]:
        """The chosen ones."""
        return self._ids

    def task(self, id: str) -> Task:
        """The agent's side."""
        return self._suite.task(id)

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        return self._suite.oracle(id)


def mixed(text: str, root: Path, open_suite: Callable[[str, Path], Suite]) -> MixedSuite:
    """The mix that a name describes."""
    return MixedSuite(text, lambda name: open_suite(name, root))
