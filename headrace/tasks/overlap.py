"""Whether training and evaluation share tasks: what a policy was trained on, an evaluation must not measure.

Two tasks are the same by name, or they have equal content: the same prompt, files and machine. Generated suites
(`source`) own ranges of seeds that are disjoint, so they are compared by name alone; a slow test draws from both sides.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.messages.tasks import Task
from headrace.tasks.base import Suite, both_sides
from headrace.tasks.certificates import source_of
from headrace.tasks.suites import open_suite

MOST_EQUAL = 0.01
"""Share of a training suite that may be left out because evaluations have tasks of equal content."""


class Overlap(NamedTuple):
    """The tasks that a training suite shares with suites of evaluation."""

    refused: str
    """Why the suite may not be trained on, in one sentence; empty when it may."""
    equal: frozenset[str]
    """Its tasks that an evaluation has too under another name: training leaves them out."""


def overlap(training: Suite, names: Iterable[str], root: str | Path) -> Overlap:
    """Compare a training suite with the suites that measure it. UnknownSuite for a suite or task that cannot be made.

    names: of the suites of evaluation; root: the folder of suites.
    """
    evaluations = [open_suite(name, root) for name in names]
    for suite in evaluations:
        if common := _common(training, suite):
            example = f"{common[0]!r}" if len(common) == 1 else f"{common[0]!r} and {len(common) - 1} more"
            return Overlap(
                f"{training.name} is trained on and {suite.name} is evaluated, and both have the task {example}: "
                "take the tasks out of one of them",
                frozenset(),
            )
    compared = [part for suite in evaluations for _, part in _parts(suite) if not source_of(part)]
    if not compared or all(source_of(part) for _, part in _parts(training)):
        return Overlap("", frozenset())
    measured = {content(both_sides(part, id)[0]) for part in compared for id in part.ids()}
    equal: set[str] = set()
    total = 0
    for prefix, part in _parts(training):
        if not source_of(part):
            ids = part.ids()
            total += len(ids)
            equal.update(prefix + id for id in ids if content(both_sides(part, id)[0]) in measured)
    refused = ""
    if len(equal) > MOST_EQUAL * total:
        refused = (
            f"{len(equal)} of {total} tasks of {training.name} have the content of tasks that are evaluated, more than "
            f"{MOST_EQUAL:.0%}: take them out of one side ({min(equal)!r} is one)"
        )
    return Overlap(refused, frozenset(equal))


def content(task: Task) -> bytes:
    """Hash of what an agent sees of a task, without its name."""
    seen = (task.prompt, task.system, sorted(task.files.items()), task.entries or (), task.machine, task.repository)
    return sha256(msgspec.msgpack.encode(seen)).digest()


def _common(training: Suite, evaluated: Suite) -> list[str]:
    """Ids that both suites have. An id of digits alone numbers a row, so it names a task only together with its
    suite."""
    common: list[str] = []
    for _, part in _parts(training):
        for _, other in _parts(evaluated):
            few, many = sorted((part, other), key=lambda suite: len(suite.ids()))
            names = many.ids() if source_of(many) else frozenset(many.ids())  # a range of seeds is too long for a set
            common += [id for id in few.ids() if id in names and (part.name == other.name or not id.isdigit())]
    return common


def _parts(suite: Suite) -> Iterator[tuple[str, Suite]]:
    """The suites of a mix or a selection with the prefix of their ids in it; any other suite alone."""
    parts: Sequence[Suite] | None = getattr(suite, "parts", None)
    if parts is None:
        yield "", suite
        return
    prefixes: Sequence[str] = getattr(suite, "prefixes", ())
    for prefix, part in zip(prefixes, parts, strict=True):
        yield from ((prefix + inner, each) for inner, each in _parts(part))
