"""A real package, and the exam of its own tests that a repair is judged by.

An exam holds the tests that pass every time over the untouched package, sealed where they compare with literals. Every
kind of task that is made of a package or a repository (attempts.py, making/commits.py) begins with one.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import msgspec

from headrace.messages.sandbox import OpResult, TestOutcome
from headrace.messages.tasks import LONGEST_TEST_S, TestPlan
from headrace.tasks import sealing
from headrace.tasks.packages.fetch import Package, fetch, read
from headrace.tasks.packages.lab import FIRST_RUN_S, Exam, Lab, SuiteError, judged, passed
from headrace.tasks.packages.recording import everything, record
from headrace.tasks.packages.requirements import install, missing

_REPEATS = 1
"""Runs of the untouched package that have to agree with the first one."""
_UNSTEADY_RUNS = 4
"""Runs of a package's tests, beside those that have to agree, in which tests may still turn out to be unsteady."""


def limit(seconds: float) -> float:
    """A suite's time limit from its time in a sandbox that is alone, seconds: a full host is many times slower, and a
    test that ran out of time counts as failed."""
    return min(max(60.0, 20.0 * seconds), LONGEST_TEST_S)


async def source_tree(source: str, name: str) -> Package:
    """A source tree, or ``NAME==VERSION`` of the package index. name: of the package; empty: its own. PackageError."""
    if Path(source).is_dir():
        return read(Path(source), name or Path(source).resolve().name)
    with tempfile.TemporaryDirectory() as folder:
        root = await asyncio.to_thread(fetch, source, Path(folder))
        return read(root, name or source.replace("==", "-"))


async def examined(lab: Lab, package: Package, say: Callable[[str], None]) -> tuple[Package, Exam]:
    """The package with what its tests need, and its exam. SuiteError."""
    package = await with_requirements(lab, package, say)
    plan, expected, seconds = await baseline(lab, package, say)
    exam = Exam(plan=msgspec.structs.replace(plan, timeout_s=limit(seconds)), expected=expected)
    say(f"{len(expected)} tests of {package.name} pass in {seconds:.1f} s")
    return package, await sealed(lab, package, exam, say)


async def with_requirements(lab: Lab, package: Package, say: Callable[[str], None]) -> Package:
    """The package with the files of its requirements, where its tests miss modules and the package names any."""
    if not package.requires:
        return package
    result = await lab.run(package.files, first_plan(package))
    modules = missing([*(test.message for test in result.tests), result.error, result.stdout, result.stderr])
    if not modules:
        return package
    say(f"tests of {package.name} miss {', '.join(modules)}; installing {', '.join(package.requires)}")
    files, error = await asyncio.to_thread(install, package.requires)
    if error:
        say(error)
        return package
    return msgspec.structs.replace(package, files=files | package.files)


def first_plan(package: Package) -> TestPlan:
    """All tests of a package."""
    return TestPlan(kind="pytest", paths=package.tests, timeout_s=FIRST_RUN_S)


def first_error(result: OpResult) -> str:
    """The first error of a run in which no test passed: of the collection, of pytest itself, or of the sandbox."""
    for test in result.tests:
        if test.message:
            return f"{test.name}: {test.message}"
    # pytest that fails before it collects (a conftest.py that cannot be imported) says so in its output alone.
    lines = [line.strip() for line in f"{result.stdout}\n{result.stderr}".splitlines()]
    errors = [
        line.removeprefix("E ").strip() for line in lines if line.startswith(("E ", "ERROR")) or "Error: " in line
    ]
    return errors[0] if errors else result.error or "no test is collected"


async def baseline(lab: Lab, package: Package, say: Callable[[str], None]) -> tuple[TestPlan, tuple[str, ...], float]:
    """A plan whose tests all pass on the untouched package, every time; their names; seconds that it takes.

    Tests that fail, that pass once and fail once, or whose name changes (a parameter that holds the sandbox's own path)
    are left out; SuiteError where none is left.
    """
    plan = first_plan(package)
    result = await lab.run(package.files, plan)
    names = passed(result)
    if not names:
        raise SuiteError(f"no test of {package.name} passes in a sandbox: {first_error(result)[:300]}")
    seen, seconds, steady = {test.name for test in result.tests}, result.wall_ms / 1e3, 0
    ahead: list[OpResult] = []
    for repeat in range(1 + _REPEATS + _UNSTEADY_RUNS):
        bad = seen - set(names)
        if bad and repeat:  # a name of one run alone cannot be asked for: the second run has the whole files too
            narrower = msgspec.structs.replace(plan, paths=_without(bad, names, package.tests))
            if narrower != plan:
                plan, ahead = narrower, []
        if not ahead:
            runs = (lab.run(package.files, plan, lane) for lane in range(1 + _REPEATS - steady))
            ahead = list(await asyncio.gather(*runs))
        again = ahead.pop(0)
        if not again.tests:
            raise SuiteError(f"a repeated run of the tests of {package.name} failed: {first_error(again)[:300]}")
        same = tuple(sorted(set(names) & set(passed(again))))
        if not same:
            raise SuiteError(f"no test of {package.name} passes every time in a sandbox: {first_error(again)[:300]}")
        ran = {test.name for test in again.tests}
        steady = steady + 1 if ran == set(names) == set(passed(again)) else 0
        seen |= ran
        names, seconds = same, max(seconds, again.wall_ms / 1e3)
        if steady > _REPEATS:
            break
    else:
        raise SuiteError(f"the tests of {package.name} are not stable: others fail in each of several runs")
    if bad := seen - set(names):
        say(f"{len(bad)} tests of {package.name} do not pass here every time and are left out, such as {min(bad)}")
    return plan, names, seconds


def _without(bad: Set[str], names: Sequence[str], tests: Sequence[str]) -> tuple[str, ...]:
    """The paths of a plan: whole files where every test is good, else the good tests by name."""
    spoilt = {name.partition("::")[0] for name in bad}
    whole = [path for path in tests if path not in spoilt and any(name.startswith(f"{path}::") for name in names)]
    return (*whole, *(name for name in names if name.partition("::")[0] in spoilt))


async def sealed(lab: Lab, package: Package, exam: Exam, say: Callable[[str], None]) -> Exam:
    """The exam with its tests sealed, as far as the untouched package passes them so; else as it was."""
    used = {path.partition("::")[0] for path in exam.plan.paths}
    files = {path: package.files[path] for path in used}
    leave: frozenset[int] = frozenset()
    for _ in range(8):
        seals = sealing.seal(files, leave)
        result = await lab.run(package.files | seals.files, exam.plan)
        if passed(result) != exam.expected:
            # A test that reads its own source, or compares inside a generated one, stays as it is.
            if not (more := sealing.seen_by(seals, {*exam.expected} - {*passed(result)}) - leave):
                break
            leave |= more
            continue
        # The judge's runs return a limited number of observed values and drop the others without an error.
        tree = package.files | seals.files
        cold, again = await asyncio.gather(everything(lab, tree, exam.plan), lab.run(tree, exam.plan))
        tests = cold or result.tests
        if bad := sealing.unequal(seals, tests) | sealing.too_much(tests):
            leave |= bad
            continue
        tried = msgspec.structs.replace(exam, sealed=seals.files, answers=sealing.recorded(seals, result.tests))
        right = passed(judged(again, tried))
        if right != exam.expected:
            if not (more := sealing.seen_by(seals, {*exam.expected} - {*right}) - leave):
                break
            leave |= more
            continue
        say(f"{len(seals.literals)} of {seals.comparisons} assertions are sealed: their answers stay with the judge")
        return await recorded(lab, package, tried, seals, result.tests, say, cold)
    say("the tests can't be sealed: what they expect goes into the sandbox")
    return exam


async def recorded(
    lab: Lab,
    package: Package,
    exam: Exam,
    seals: sealing.Sealed,
    tests: Sequence[TestOutcome],
    say: Callable[[str], None],
    cold: Sequence[TestOutcome] | None = None,
) -> Exam:
    """The exam with the values of the untouched code where two computed ones are compared, as far as they are always
    the same. cold: what `everything` gave for these sealed tests."""
    if not sealing.pairs(seals, exam.answers)[1]:
        return exam
    answers, again = await asyncio.gather(
        record(lab, package.files, exam.plan, seals, tests, cold), lab.run(package.files | exam.sealed, exam.plan)
    )
    tried = msgspec.structs.replace(exam, answers=answers)
    if passed(judged(again, tried)) != exam.expected:
        tried = exam
    answered, both = sealing.pairs(seals, tried.answers)
    say(f"{answered} of {both} comparisons of two computed values have those of the untouched code as their answer")
    return tried
