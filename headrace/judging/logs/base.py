"""A log parser: from the text that a test command wrote to test names with their outcomes.

A candidate can choose a text on which a careless pattern is slow. A pattern here therefore takes time in proportion to
its line, also where it does not match: two repeated parts of a pattern never match the same characters, and a search
does not read the same characters again from every position.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

Outcome = Literal["passed", "failed", "error", "skipped"]
Outcomes = dict[str, Outcome]
Parser = Callable[[str], Outcomes]
"""Never raises: a line that it does not know is not a test. The last line about a test counts."""

WORDS: dict[str, Outcome] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "passed",
}
"""pytest's words. XFAIL counts as passed: the author of the test expects the failure."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def lines(log: str) -> Iterator[str]:
    """The lines of a log without terminal colours and carriage returns."""
    for line in log.split("\n"):
        yield _ANSI.sub("", line).rstrip("\r")


def matched(log: str, pattern: re.Pattern[str], words: dict[str, Outcome]) -> Outcomes:
    """Outcomes of the stripped lines that match a pattern with the groups ``word`` and ``name``."""
    outcomes: Outcomes = {}
    for line in lines(log):
        match = pattern.match(line.strip())
        if match and match["word"] in words:
            outcomes[match["name"].strip()] = words[match["word"]]
    return outcomes


def first_word(line: str, words: Iterable[str]) -> str:
    """The first of these words with which the line begins; empty if there is none."""
    return next((word for word in words if line.startswith(word)), "")
