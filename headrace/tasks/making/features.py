"""Tasks by feature deletion: a feature of a package is removed and the task asks for it; tests of the rest pass.

The hidden tests are the package's own. To pass are those that fail without the feature, to keep are the others; both
sets come from runs in sandboxes, never from names. The agent gets the package without the feature, the tests that pass
without it, and signature and documentation in the prompt. A feature makes no task where most tests need it, where no
test that fails names it, or where its text is left anywhere in the agent's files (tasks/leaks.py).

Trade-off: the agent gets only the documentation, so a feature with a poor docstring makes a hard task.
"""

import random
import re
from collections.abc import Mapping, Sequence

import msgspec

from headrace.messages.tasks import Grading, Oracle, Task, TaskRef
from headrace.tasks import leaks
from headrace.tasks.making.journal import NoTask
from headrace.tasks.making.removal import Feature, features, hollow, mentions, without
from headrace.tasks.packages.attempts import thin
from headrace.tasks.packages.fetch import Package
from headrace.tasks.packages.lab import Exam, Lab, passed

MOST = 0.5
"""Largest share of the tests that may need a feature; a feature that more tests need is most of the package."""


def candidates(package: Package, seed: int) -> list[Feature]:
    """The features of a package in random order."""
    candidates = list(features(package))
    random.Random(f"headrace/features/{package.name}/{seed}").shuffle(candidates)
    return candidates


def id_of(package: Package, feature: Feature) -> str:
    """The task's id."""
    path = feature.path.removesuffix(".py").replace("/", "-")
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{package.name}--{path}--{feature.name}")[:120]


async def attempt(lab: Lab, package: Package, feature: Feature, exam: Exam, suite: str) -> tuple[Task, Oracle]:
    """Both sides of a feature's task. NoTask."""
    changed = without(package, feature)
    if changed is None or feature.path not in changed:
        raise NoTask("the code without it is not Python any more")
    failing = await _failing(lab, package, changed, exam)
    emptied = len(failing) > MOST * len(exam.expected) and (empty := hollow(package, feature)) is not None
    if emptied and empty is not None:
        # Where the package is not imported without the definition, all tests fail: its signature stays instead.
        changed = empty
        failing = await _failing(lab, package, changed, exam)
    if not failing:
        raise NoTask("no test needs it")
    if len(failing) > MOST * len(exam.expected):
        raise NoTask(f"{len(failing)} of {len(exam.expected)} tests need it, more than {MOST:.0%}")
    if not mentions(package, dict.fromkeys(failing), feature.short):
        raise NoTask("no test that fails without it names it")
    task, oracle = assemble(package, feature, changed, exam, failing, suite, emptied=emptied)
    solution = [leaks.added(task.files.get(path, b""), content) for path, content in oracle.solution.items()]
    if left := list(leaks.remains(task.files, [text for texts in solution for text in texts], (feature.short,))):
        raise NoTask(f"its text is left: {left[0]}")
    rest = await lab.run(task.files, task.tests)
    if not rest.ok:
        raise NoTask(f"the tests that do not need it do not all pass: {rest.error[:200]}")
    return task, oracle


async def _failing(lab: Lab, package: Package, changed: Mapping[str, bytes], exam: Exam) -> tuple[str, ...]:
    """The tests that do not pass with the changed files. NoTask when none runs."""
    result = await lab.run({**package.files, **changed}, exam.plan)
    if result.timed_out or not result.tests:
        raise NoTask("the tests do not run without it")
    green = set(passed(result))
    return tuple(name for name in exam.expected if name not in green)


def assemble(
    package: Package,
    feature: Feature,
    changed: Mapping[str, bytes],
    exam: Exam,
    failing: Sequence[str],
    suite: str,
    *,
    emptied: bool = False,
) -> tuple[Task, Oracle]:
    """Both sides of a task. changed: the Python files as they are without the feature. emptied: its signature is
    left."""
    green = sorted(set(exam.expected) - set(failing))
    visible: dict[str, bytes] = {}
    for path in package.tests:
        remaining = {name.partition("[")[0].partition("::")[2] for name in green if name.partition("::")[0] == path}
        remaining -= {name.partition("[")[0].partition("::")[2] for name in failing if name.partition("::")[0] == path}
        if remaining:
            visible[path] = thin(changed.get(path, package.files[path]), remaining)
    paths = tuple(
        path
        for path in exam.plan.paths
        if path.partition("::")[0] in visible and path not in failing and not _half(path, failing)
    )
    code = {path: changed.get(path, data) for path, data in package.files.items() if path not in package.tests}
    sources = [path for path in package.sources if path in changed]
    ref = TaskRef(suite, id_of(package, feature))
    task = Task(
        ref=ref,
        family=f"feature:{re.sub(r'-[0-9][^-]*$', '', package.name)}",
        prompt=prompt(feature, [path for path in sources if path != feature.path], emptied),
        files=code | visible,
        allowed=package.sources,
        tests=msgspec.structs.replace(exam.plan, paths=paths),
        template="debian",
    )
    oracle = Oracle(
        ref=ref,
        hidden={path: package.files[path] for path in sorted({*package.tests, *package.support})},
        tests=exam.plan,
        expected=tuple(failing),
        grading=Grading(kind="f2p_p2p", pass_to_pass=tuple(green)),
        sealed=exam.sealed,
        answers=exam.answers,
        solution={path: package.files[path] for path in sources},
    )
    return task, oracle


def _half(path: str, failing: Sequence[str]) -> bool:
    """Whether a path is a test by name of a function of which some parameters need the feature: it is not shown."""
    return "::" in path and any(name.partition("[")[0] == path.partition("[")[0] for name in failing)


def prompt(feature: Feature, exported: Sequence[str], emptied: bool = False) -> str:
    """The text of a task."""
    owner, _, short = feature.name.rpartition(".")
    kind = f"method `{short}` of class `{owner}`" if owner else f"`{short}`"
    also = f" Other modules import or list it again: {', '.join(exported)}." if exported else ""
    lost = f"the body of {kind}" if emptied else kind
    return f"{feature.path} has lost {lost}. Write it so that it does what is said here.{also}\n\n{feature.skeleton}\n"
