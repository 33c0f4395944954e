"""A task suite from a real package: mutate its code where its own tests notice, and verify each task in sandboxes.

A task's hidden tests are the package's own. The agent gets the sources and about half of the test functions, always
with one that fails, so that there is a symptom to follow and something left to be judged by (packages/visible.py). A
task enters the suite when, in fresh sandboxes, the tests fail before the fix and pass after it, and repeats say
exactly the same. Which tests call which function is known from one traced run (packages/reach.py): a change is tried
with those that call it, and the whole suite runs only where one of them fails.
"""

import asyncio
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence, Set
from contextlib import aclosing
from pathlib import Path

import msgspec

from headrace.messages.sandbox import OpResult, TestOutcome
from headrace.messages.tasks import LONGEST_TEST_S, Oracle, Task, TestPlan
from headrace.tasks import sealing
from headrace.tasks.packages.attempts import attempt, in_order
from headrace.tasks.packages.fetch import Package, PackageError, fetch, read
from headrace.tasks.packages.lab import FIRST_RUN_S, Exam, Lab, Sandboxes, SuiteError, judged, passed
from headrace.tasks.packages.mutate import Mutation, mutations
from headrace.tasks.packages.reach import Reach, traced
from headrace.tasks.packages.recording import everything, record
from headrace.tasks.packages.requirements import install, missing
from headrace.tasks.suites import FolderSuite, write_suite

_UNSTEADY_RUNS = 4
"""Runs of a package's tests, beside those that have to agree, in which tests may still turn out to be unsteady."""


def limit(seconds: float) -> float:
    """A suite's time limit from its time in a sandbox that is alone, seconds: a full host is many times slower, and a
    test that ran out of time counts as failed."""
    return min(max(60.0, 20.0 * seconds), LONGEST_TEST_S)


class SuiteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The suite to be made: of which package, how many tasks, where it is written."""

    package: str = ""
    """``NAME==VERSION`` from the package index; or `path`."""
    path: Path | None = None
    """A source tree."""
    test_command: str = ""
    """argv as text, for packages whose tests pytest alone cannot run; judged by its JUnit report if it names one, else
    by its exit code."""
    count: int = 20
    seed: int = 1
    name: str = ""
    """Name of the suite; empty: the package's name."""
    root: Path = Path("suites")
    """Folder of suites."""
    template: str = "debian"
    parallel: int = 2
    """Mutations that are tried at once."""
    repeats: int = 1
    """How often the judge's runs are repeated, per task (beside the first run with the mutation) and for the untouched
    package."""


async def build(
    request: SuiteRequest, sandboxes: Sandboxes, say: Callable[[str], None] = lambda text: None
) -> FolderSuite:
    """Make and write the suite; deterministic by seed, as far as the package's tests are. SuiteError says why not."""
    try:
        if request.path is not None:
            package = read(request.path, request.name or request.path.resolve().name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                tree = await asyncio.to_thread(fetch, request.package, Path(folder))
                package = read(tree, request.name or request.package.replace("==", "-"))
    except PackageError as error:
        raise SuiteError(str(error)) from None
    lab = Lab(sandboxes, f"suite-{package.name}", request.template)
    package = await with_requirements(lab, package, request.test_command, say)
    plan, expected, seconds = await baseline(lab, package, request.test_command, request.repeats, say)
    plan = msgspec.structs.replace(plan, timeout_s=limit(seconds))
    exam, reach = await asyncio.gather(
        sealed(lab, package, Exam(plan=plan, expected=expected), say), _reach(lab, package, plan, say)
    )
    say(
        f"{len(expected)} tests of {package.name} pass in {seconds:.1f} s; looking for {request.count} bugs they notice"
    )

    rng = random.Random(f"headrace/{package.name}/{request.seed}")
    mutations = _candidates(package, rng)
    near = [reach and reach.of(mutation, package.files[mutation.path]) for mutation in mutations]
    candidates = [each for each in zip(mutations, near, strict=True) if each[1] is None or each[1] & {*expected}]
    if not candidates:
        say("no test calls a function of the package in its own process; all tests run for each change")
        candidates = [(mutation, None) for mutation in mutations]
    elif len(candidates) < len(mutations):
        say(f"{len(mutations) - len(candidates)} of {len(mutations)} changes are in functions that no test calls")
    pairs: list[tuple[Task, Oracle]] = []
    tried = 0

    async def one(candidate: tuple[Mutation, frozenset[str] | None], lane: int) -> tuple[Task, Oracle] | None:
        return await attempt(lab, package, candidate[0], exam, request.repeats, request.seed, lane, candidate[1])

    # In order: which bugs enter the suite must not depend on which sandbox is faster.
    async with aclosing(in_order(candidates, one, request.parallel)) as attempts:
        async for (mutation, _), made in attempts:
            tried += 1
            if made is not None:
                pairs.append(made)
                say(f"{len(pairs)}/{request.count}: {mutation.kind} in {mutation.path}:{mutation.line} ({tried} tried)")
            if len(pairs) == request.count:
                break
    if not pairs:
        raise SuiteError(f"no change of {package.name} was noticed by its tests ({tried} tried)")
    pairs.sort(key=lambda pair: pair[0].ref.task)
    return write_suite(package.name, request.root / package.name, pairs, request.package or str(request.path))


async def _reach(lab: Lab, package: Package, plan: TestPlan, say: Callable[[str], None]) -> Reach | None:
    """Which tests can notice which change; None where that is not known, and all tests run for each."""
    if plan.kind != "pytest":
        return None
    try:
        return await traced(lab, package.files, plan, 1)
    except SuiteError as error:
        say(f"{error}; all tests run for each change")
        return None


async def with_requirements(lab: Lab, package: Package, test_command: str, say: Callable[[str], None]) -> Package:
    """The package with the files of its requirements, where its tests miss modules and the package names any."""
    if not package.requires:
        return package
    result = await lab.run(package.files, first_plan(package, test_command))
    modules = missing([*(test.message for test in result.tests), result.error, result.stdout, result.stderr])
    if not modules:
        return package
    say(f"tests of {package.name} miss {', '.join(modules)}; installing {', '.join(package.requires)}")
    files, error = await asyncio.to_thread(install, package.requires)
    if error:
        say(error)
        return package
    return msgspec.structs.replace(package, files=files | package.files)


def first_plan(package: Package, test_command: str = "") -> TestPlan:
    """All tests of a package: by pytest, or by a command of the user's own."""
    if test_command:
        return TestPlan(kind="command", argv=tuple(shlex.split(test_command)), timeout_s=FIRST_RUN_S)
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


def _candidates(package: Package, rng: random.Random) -> list[Mutation]:
    """Mutations in random order, at most one a line, so that a suite is spread over the package."""
    candidates = [mutation for path in package.sources for mutation in mutations(path, package.files[path])]
    rng.shuffle(candidates)
    return list({(mutation.path, mutation.line): mutation for mutation in reversed(candidates)}.values())[::-1]


async def baseline(
    lab: Lab, package: Package, test_command: str, repeats: int, say: Callable[[str], None]
) -> tuple[TestPlan, tuple[str, ...], float]:
    """A plan whose tests all pass on the untouched package, every time; their names; seconds that it takes.

    Tests that fail, that pass once and fail once, or whose name changes (a parameter that holds the sandbox's own path)
    are left out; SuiteError where none is left, or where a command of the user's own has such tests.
    """
    plan = first_plan(package, test_command)
    result = await lab.run(package.files, plan)
    names = passed(result)
    if not names:
        raise SuiteError(f"no test of {package.name} passes in a sandbox: {first_error(result)[:300]}")
    seen, seconds, steady = {test.name for test in result.tests}, result.wall_ms / 1e3, 0
    ahead: list[OpResult] = []
    for repeat in range(1 + repeats + _UNSTEADY_RUNS):
        bad = seen - set(names)
        if bad and test_command:
            raise SuiteError(
                f"{len(bad)} tests of {package.name} do not pass every time in a sandbox, such as {min(bad)}"
            )
        if bad and repeat:  # a name of one run alone cannot be asked for: the second run has the whole files too
            narrower = msgspec.structs.replace(plan, paths=_without(bad, names, package.tests))
            if narrower != plan:
                plan, ahead = narrower, []
        if not ahead:
            runs = (lab.run(package.files, plan, lane) for lane in range(1 + repeats - steady))
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
        if steady > repeats:
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
    if exam.plan.kind != "pytest":
        return exam
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
