"""Logs of Python's runners: pytest in four spellings, unittest, Django's and sympy's runner."""

import itertools
import re

from headrace.judging.logs.base import WORDS, Outcome, Outcomes, first_word, lines

_COUNT = re.compile(r"\[\d+\]$")
_OPTIONS = re.compile(r"([^\[]*)\[(.*)\]")
_SUFFIXES: tuple[tuple[str, Outcome], ...] = (
    (" ... ok", "passed"),
    (" ... OK", "passed"),
    (" ...  OK", "passed"),
    (" ... FAIL", "failed"),
    (" ... ERROR", "error"),
)
_HEADS: tuple[tuple[str, Outcome], ...] = (("FAIL:", "failed"), ("ERROR:", "error"))
_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_VERSION = "--version is equivalent to version"
_SYMPY_HEAD = re.compile(r"_+ (?P<file>[^:]*\.py):(?P<name>[^ ]*) _+$")
_SYMPY_WORDS: tuple[tuple[str, Outcome], ...] = ((" E", "error"), (" F", "failed"), (" ok", "passed"))
_UNITTEST = re.compile(r"^(?P<name>\w+ \([\w.]+\)|[\w.]+)(?:\s.*)? \.\.\. (?P<word>ok|FAIL|ERROR|skipped|expected)\b")
_UNITTEST_WORDS: dict[str, Outcome] = {
    "ok": "passed",
    "FAIL": "failed",
    "ERROR": "error",
    "skipped": "skipped",
    "expected": "passed",
}


def _not_a_test(word: str, name: str) -> bool:
    """``SKIPPED [3] path:line: reason`` counts skips and names no test."""
    return word == "SKIPPED" and bool(_COUNT.match(name))


def pytest(log: str) -> Outcomes:
    """The short summary (``-rA``): ``PASSED path::test``, where a name ends at the first space."""
    outcomes: Outcomes = {}
    for line in lines(log):
        if first_word(line, WORDS):
            words = line.split()
            if len(words) > 1 and words[0] in WORDS and not _not_a_test(words[0], words[1]):
                outcomes[words[1]] = WORDS[words[0]]
    return outcomes


def pytest_options(log: str) -> Outcomes:
    """As `pytest`; an absolute path in a parameter is cut to its last part, because it differs between machines."""
    outcomes: Outcomes = {}
    for name, outcome in pytest(log).items():
        match = _OPTIONS.match(name)
        if match:
            main, option = match.groups()
            if option.startswith("/") and not option.startswith("//") and "*" not in option:
                option = "/" + option.rpartition("/")[2]
            name = f"{main}[{option}]"
        outcomes[name] = outcome
    return outcomes


def pytest_spaces(log: str) -> Outcomes:
    """The short summary with names that hold spaces, or ``path::test PASSED`` at the end of a line."""
    outcomes: Outcomes = {}
    for line in lines(log):
        line = "".join(char for char in line if char >= " ")
        if first_word(line, WORDS):
            words = (line.split(" - ", 1)[0] if line.startswith("FAILED") else line).split()
            if len(words) > 1 and words[0] in WORDS and not _not_a_test(words[0], words[1]):
                outcomes[" ".join(words[1:])] = WORDS[words[0]]
        elif any(line.endswith(word) for word in WORDS):
            words = line.split()
            if len(words) > 1 and words[-1] in WORDS:
                outcomes[" ".join(words[:-1])] = WORDS[words[-1]]
    return outcomes


def pytest_verbose(log: str) -> Outcomes:
    """Lines of ``-v``: ``path::test PASSED [ 50%]``, also with the worker of xdist before them, and the summary."""
    outcomes: Outcomes = {}
    for line in lines(log):
        words = re.sub(r"^\[gw\d+\]\s*(?:\[\s*\d+%\]\s*)?", "", line).split()
        if len(words) < 2:
            continue
        if words[0] in WORDS and not _not_a_test(words[0], words[1]):
            outcomes[words[1]] = WORDS[words[0]]
        elif words[1] in WORDS and "::" in words[0]:
            outcomes[words[0]] = WORDS[words[1]]
    return outcomes


def matplotlib(log: str) -> Outcomes:
    """As `pytest`; two buttons have the names of an older version."""
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def seaborn(log: str) -> Outcomes:
    """The summary, and lines of ``-v`` for passed tests."""
    outcomes: Outcomes = {}
    for line in lines(log):
        words = line.split()
        if len(words) > 1 and words[0] in ("PASSED", "FAILED") and line.startswith(words[0]):
            outcomes[words[1]] = WORDS[words[0]]
        elif len(words) > 1 and words[1] == "PASSED" and " PASSED " in line:
            outcomes[words[0]] = "passed"
    return outcomes


def unittest(log: str) -> Outcomes:
    """``python -m unittest -v``: ``test_a (tests.test_x.TestX.test_a) ... ok``; other output may stand between the
    dots and the word."""
    outcomes: Outcomes = {}
    open_name = ""
    for line in lines(log):
        line = line.strip()
        match = _UNITTEST.match(line)
        if match:
            outcomes[match["name"]] = _UNITTEST_WORDS[match["word"]]
            open_name = ""
        elif " ... " in f"{line} ":
            open_name = line.split(" ...")[0].split(" | ")[0].strip()
        elif open_name and line in _UNITTEST_WORDS:
            outcomes[open_name] = _UNITTEST_WORDS[line]
            open_name = ""
    return outcomes


def django(log: str) -> Outcomes:
    """Django's runner (``--verbosity 2``): the lines of unittest, where a test's docstring may replace its name and
    output may stand between the name and its ``ok``."""
    outcomes: Outcomes = {}
    last = ""
    for line in lines(log):
        line = line.strip()
        if _VERSION in line:
            outcomes[_VERSION] = "passed"
        if " ... " in line:
            last = line.split(" ... ")[0]
        for suffix, outcome in _SUFFIXES:
            if line.endswith(suffix):
                text = line.split("...", 1)[-1].strip() if line.startswith(_MIGRATION) else line
                outcomes[text.rsplit(suffix, 1)[0]] = outcome
                break
        if " ... skipped" in line:
            outcomes[line.split(" ... skipped")[0]] = "skipped"
        for head, outcome in _HEADS:
            if line.startswith(head) and len(line.split()) > 1:
                outcomes[line.split()[1]] = outcome
        if line.startswith("ok") and last:
            outcomes[last] = "passed"
    return outcomes | _silenced(log)


def _silenced(log: str) -> Outcomes:
    """Tests whose line ends with a report of Django itself, before a line with ``ok`` alone."""
    outcomes: Outcomes = {}
    rows = [line.rstrip("\r") for line in log.split("\n")]
    waiting = ""
    for row, after in itertools.pairwise(rows):
        name, _, report = row.partition(" ... ")
        if report.startswith("Testing against Django installed in ") and not waiting:
            waiting = name
        if after != "ok":
            continue
        internal = report.startswith("Internal Server Error: /") and report.count("/") > 1 and report.endswith("/")
        if internal or report == "System check identified no issues (0 silenced)":
            outcomes[name] = "passed"
        if waiting and row.endswith(" silenced)."):
            outcomes[waiting] = "passed"
            waiting = ""
    return outcomes


def sympy(log: str) -> Outcomes:
    """sympy's ``bin/test --verbose``: ``test_name ok``, and a headline for each failure."""
    outcomes: Outcomes = {}
    stripped = [line.strip() for line in lines(log)]
    for line in stripped:
        if match := _SYMPY_HEAD.match(line):
            outcomes[f"{match['file']}:{match['name']}"] = "failed"
    for line in stripped:
        for suffix, outcome in _SYMPY_WORDS:
            if line.startswith("test_") and line.endswith(suffix):
                outcomes[line.split()[0]] = outcome
    return outcomes
