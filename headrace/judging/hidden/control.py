"""Altered hidden tests: copies that no code passes, in which a random expectation of each test is another one.

Names and shape stay the same, and every judgement draws its own. A candidate that passes the hidden tests runs once
more with the altered ones, in another fresh sandbox. A repair fails them. Code that has taken over the runner, compares
equal to everything, ends the process with code 0, reads the expectations, or writes the report, the log or the reward
itself passes both: it has shown nothing about the task. Before that counts, the known solution runs with the same
altered tests: where it passes them, the command does not run the tests that were altered.

Tests whose values the judge compares outside (tasks/sealing.py) need no copy.
"""

import random
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

import msgspec

from headrace.judging.verdicts import Examination
from headrace.messages.tasks import Oracle
from headrace.tasks.altering import altered


class Altered(NamedTuple):
    """The altered tests of one judgement."""

    oracle: Oracle
    tests: frozenset[str]
    """Ids, without parameters, of the altered tests that are reported by name."""

    def passed(self, control: Examination, real: Examination) -> bool:
        """Whether altered tests passed, or gave as much reward as the real ones."""
        lowest = self.oracle.grading.lowest or 0.0
        paid = real.value is not None and lowest < real.value <= (control.value or lowest)
        reported = any(test.outcome == "passed" and _id(test.name) in self.tests for test in control.tests)
        return control.ok or reported or paid


def control(oracle: Oracle, diff: Mapping[str, bytes]) -> Altered | None:
    """Altered tests for a candidate; None where none can be altered, or where the judge compares all values itself.
    The draw follows from both arguments: the same candidate gets the same tests."""
    sealed = {name for name, answers in oracle.answers.items() if any(text for _, text in answers)}
    if oracle.expected and sealed.issuperset(oracle.expected):
        return None
    hidden = {**oracle.hidden, **oracle.sealed}
    digest = sha256(msgspec.msgpack.encode([sorted(hidden.items()), sorted(diff.items())]))
    wanted: dict[str, dict[str, list[str]]] = {}
    for id in {_id(name) for name in oracle.expected if name not in sealed and ".py::" in name}:
        path, _, name = id.partition("::")
        wanted.setdefault(path, {}).setdefault(name.rpartition("::")[2], []).append(id)
    # A patch is altered as a whole: its lines do not name their tests.
    alone = None if any(path.endswith(".patch") for path in hidden) else wanted or None
    files = altered(hidden, random.Random(digest.digest()), alone)
    if not files:
        return None
    tests = {id for path, (_, names) in files.items() for name in names for id in wanted.get(path, {}).get(name, ())}
    plan = oracle.tests
    if tests and plan.kind != "command":
        chosen = {id.partition("::")[0] for id in tests} if plan.kind == "functions" else tests
        plan = msgspec.structs.replace(plan, paths=tuple(sorted(chosen)))
    hidden |= {path: content for path, (content, _) in files.items()}
    return Altered(msgspec.structs.replace(oracle, hidden=hidden, sealed={}, tests=plan), frozenset(tests))


def unproven(oracle: Oracle) -> str:
    """Why a pass of a task's tests may prove no repair, in one sentence; empty where altered tests or compared values
    prove it."""
    if oracle.grading.kind == "checker":
        return ""
    for step in oracle.steps.tests if oracle.steps else ():
        if not altered(step.hidden, random.Random(0)):
            return f"the tests of step {step.name} cannot be altered, {_FORGED}"
    sealed = oracle.answers and all(any(text for _, text in oracle.answers.get(name, ())) for name in oracle.expected)
    if not oracle.steps and not sealed and control(oracle, {}) is None:
        return f"its tests cannot be altered, {_FORGED}"
    return ""


_FORGED = "so what the candidate's own programs print, write or return can forge the verdict"


def _id(name: str) -> str:
    """The name of a test without its parameters."""
    return name.partition("[")[0]
