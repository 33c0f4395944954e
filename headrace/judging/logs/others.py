"""Logs of go, cargo, jest and TAP, and JUnit reports."""

import re
from xml.etree import ElementTree

from headrace.judging.logs.base import Outcome, Outcomes, matched

_GO = re.compile(r"^--- (?P<word>PASS|FAIL|SKIP): (?P<name>.+) \([^()]+\)$")
_CARGO = re.compile(r"^test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<word>\w+)$")
_JEST = re.compile(r"^(?P<word>[✓✕○])\s(?P<name>.+?)(?:\s\(\d+(?:\.\d+)?\s*m?s\))?$")
_TAP = re.compile(r"^(?P<word>ok|not ok) \d+ (?P<name>.+)$")
_DIRECTIVE = re.compile(r"\s#\s*(skip|todo)\b.*$", re.IGNORECASE)
_UNSAFE = re.compile(rb"<!(?:DOCTYPE|ENTITY)", re.IGNORECASE)


def go(log: str) -> Outcomes:
    """``go test -v``, subtests included."""
    return matched(log, _GO, {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"})


def cargo(log: str) -> Outcomes:
    """``cargo test``."""
    return matched(log, _CARGO, {"ok": "passed", "FAILED": "failed", "ignored": "skipped"})


def jest(log: str) -> Outcomes:
    """``jest --verbose``, without the duration that it prints for slow tests alone."""
    return matched(log, _JEST, {"✓": "passed", "✕": "failed", "○": "skipped"})


def tap(log: str) -> Outcomes:
    """The Test Anything Protocol. A directive decides: ``# SKIP`` is skipped, ``# TODO`` may fail."""
    outcomes: Outcomes = {}
    for name, outcome in matched(log, _TAP, {"ok": "passed", "not ok": "failed"}).items():
        directive = _DIRECTIVE.search(name)
        if directive:
            word: Outcome = "skipped" if directive[1].lower() == "skip" else "passed"
            outcomes[name[: directive.start()].strip()] = word
        else:
            outcomes[name] = outcome
    return outcomes


def junit(log: str) -> Outcomes:
    """A JUnit report: ``classname::name``. Entities are refused, because a small report could name a huge one."""
    data = log.encode("utf-8", "replace")
    if _UNSAFE.search(data):
        return {}
    try:
        cases = list(ElementTree.fromstring(data).iter("testcase"))
    except ElementTree.ParseError:
        return {}
    outcomes: Outcomes = {}
    for case in cases:
        outcome: Outcome = "passed"
        for part in case:
            if part.tag == "failure":
                outcome = "failed"
            elif part.tag == "error":
                outcome = "error"
            elif part.tag == "skipped" and part.get("type") != "pytest.xfail":
                outcome = "skipped"
        outcomes[f"{case.get('classname', '')}::{case.get('name', '')}"] = outcome
    return outcomes
