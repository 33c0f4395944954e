"""Plugins: a suite of sums without sandboxes, its checker, and a reward that combines tests with a price for tokens.

    pip install -e examples/math_suite
    headrace eval --policy scripted:oracle --suite sums/easy --tasks 8

In a run: `[tasks] suite = "sums/easy"`, and `[algorithm] reward = "priced_tests"` with
`options.reward = { tests = 0.25, free = 200, price = 0.001 }`.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.algorithms.rewards import Judged
from headrace.judging.checkers import Message, number
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef, TestPlan
from headrace.tasks import UnknownSuite

DIGITS = {"easy": 2, "hard": 6}
NO_TESTS = TestPlan(kind="command", argv=("true",))


class Sums:
    """A thousand sums of two numbers."""

    def __init__(self, level: str) -> None:
        self.name, self._level = f"sums/{level}", level

    def ids(self) -> Sequence[str]:
        """Seeds as text."""
        return [str(seed) for seed in range(1000)]

    def _terms(self, id: str) -> tuple[int, int]:
        if id not in self.ids():
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        rng = random.Random(f"{self.name}/{id}")
        high = 10 ** DIGITS[self._level]
        return rng.randrange(high), rng.randrange(high)

    def task(self, id: str) -> Task:
        """One message, without tools."""
        a, b = self._terms(id)
        return Task(
            ref=TaskRef(self.name, id),
            family=self.name,
            system="Work it out, then write the result on a last line that begins with 'answer:'.",
            prompt=f"What is {a} + {b}?",
            files={},
            allowed=(),
            tests=NO_TESTS,
            sandbox=False,
        )

    def oracle(self, id: str) -> Oracle:
        """The sum."""
        a, b = self._terms(id)
        grading = Grading(kind="checker", checker="worked", reference={"answer": str(a + b)})
        return Oracle(
            ref=TaskRef(self.name, id),
            hidden={},
            tests=NO_TESTS,
            expected=(),
            solution={},
            answer=f"{a} + {b} = {a + b}\nanswer: {a + b}",
            grading=grading,
        )


def open_sums(name: str, root: Path) -> Sums:
    """``sums/easy`` and ``sums/hard``."""
    if name not in DIGITS:
        raise UnknownSuite(f"expected sums/ and one of {', '.join(DIGITS)}, got 'sums/{name}'")
    return Sums(name)


def worked(message: Message) -> float:
    """1 for the right result, 0.1 for a wrong number at the right place, 0 otherwise."""
    if number(message):
        return 1.0
    return 0.1 if "answer:" in message.text.lower() else 0.0


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """`[algorithm.options.reward]`."""

    tests: float = 0.0
    """Share of the passed tests."""
    free: int = 0
    """Tokens without a price."""
    price: float = 0.0
    """Of each token beyond them."""


def priced_tests(judged: Judged, options: Prices) -> float:
    """A pass, plus a share for single tests, minus a price for tokens beyond the free ones."""
    if judged.verdict == "cheating":
        return 0.0
    passed = sum(test.outcome == "passed" for test in judged.tests) / max(1, len(judged.tests))
    earned = judged.value if judged.value is not None else float(judged.passed)
    return earned + options.tests * passed - options.price * max(0, judged.tokens - options.free)
