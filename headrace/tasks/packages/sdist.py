"""A task suite from a real package: mutate its code where its own tests notice, and verify each task in sandboxes.

A task's hidden tests are the package's own. The agent gets the sources and about half of the test functions, always
with one that fails, so that there is a symptom to follow and something left to be judged by (tasks/visible.py). A
task enters the suite when, in fresh sandboxes, the tests fail before the fix and pass after it, and repeats say
exactly the same.
"""

import asyncio
import random
import re
import shlex
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.messages.sandbox import Acquire, NoRoom, OpResult, RunTests, Sandbox, SandboxLost, TestOutcome
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks import sealing
from headrace.tasks.mutate import Mutation, mutations
from headrace.tasks.packages import Package, PackageError, fetch, read
from headrace.tasks.recording import everything, record
from headrace.tasks.suites import FolderSuite, write_suite
from headrace.tasks.visible import choose, thin

_FIRST_RUN_S = 300.0
"""Seconds that a package's tests may take; the tasks' own limit follows from what they took."""
_PROMPT = 300
"""Characters of a prompt: it has to fit into the smallest context that anybody uses."""


class SuiteError(Exception):
    """No suite can be made of this package; one sentence says why."""


class Held(Sandbox, Protocol):
    """A sandbox that can be given back."""

    @property
    def id(self) -> str:
        """What `release` takes."""


class Exam(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair is judged by: the package's tests, sealed where they compare with literals."""

    plan: TestPlan
    expected: tuple[str, ...]
    """Names of the tests, sorted."""
    sealed: dict[str, bytes] = {}
    answers: sealing.Answers = {}


class Lab:
    """Fresh sandboxes, as many as the host has room for.

    Each run has a sandbox of its own, but the sandboxes of a lane are slots of one machine for as long as it has some:
    a machine that has run the tests before runs them several times faster under emulation.
    """

    def __init__(
        self, acquire: Callable[[Acquire], Awaitable[Held]], release: Callable[[str], object], run: str, template: str
    ) -> None:
        self._acquire, self._release, self._run, self._template = acquire, release, run, template
        self._count = 0

    @asynccontextmanager
    async def sandbox(self, files: dict[str, bytes], lane: int, alone: bool) -> AsyncIterator[Sandbox]:
        """A sandbox with these files; waits while the host has no room."""
        self._count += 1
        request = Acquire(
            run=self._run,
            lane="eval",
            role="rollout",
            group=f"s{self._count:06d}" if alone else f"lane{lane}",
            slot=self._count,
            attempt=0,
            isolation="episode" if alone else "group",
            template=self._template,
            lease_s=2 * _FIRST_RUN_S,
            files=files,
        )
        while True:
            try:
                held = await self._acquire(request)
                break
            except NoRoom:
                await asyncio.sleep(0.2)
        try:
            yield held
        finally:
            self._release(held.id)

    async def run(self, files: dict[str, bytes], plan: TestPlan, lane: int = 0) -> OpResult:
        """The tests over these files in a fresh sandbox. One that was lost may have been a neighbour's fault: once
        more, alone; lost again, the run has failed."""
        for alone in (False, True):
            try:
                async with self.sandbox(files, lane, alone) as sandbox:
                    return await sandbox.call(RunTests(plan=plan))
            except SandboxLost as error:
                lost = OpResult(ok=False, error=str(error))
        return lost

    async def judge(self, files: dict[str, bytes], exam: Exam, lane: int = 0) -> OpResult:
        """The exam over a repository, with the outcomes that the judge would see."""
        result = await self.run(files | exam.sealed, exam.plan, lane)
        return msgspec.structs.replace(result, tests=sealing.settle(result.tests, exam.answers))


def passed(result: OpResult) -> tuple[str, ...]:
    """Names of the tests that passed, sorted."""
    return tuple(sorted(test.name for test in result.tests if test.outcome == "passed"))


def limit(seconds: float) -> float:
    """A suite's time limit from its time in a sandbox that is alone, seconds: a full host is many times slower, and a
    test that ran out of time counts as failed."""
    return max(60.0, 20.0 * seconds)


async def build(
    *,
    package: str = "",
    path: Path | None = None,
    test_command: str = "",
    count: int = 20,
    seed: int = 1,
    name: str = "",
    root: Path = Path("suites"),
    acquire: Callable[[Acquire], Awaitable[Held]],
    release: Callable[[str], object],
    say: Callable[[str], None] = lambda text: None,
    template: str = "debian",
    parallel: int = 2,
    repeats: int = 1,
) -> FolderSuite:
    """Make and write the suite; deterministic by seed, as far as the package's tests are. SuiteError says why not.

    package: ``NAME==VERSION`` from the package index, or path: a source tree. test_command: argv as text for packages
    whose tests pytest alone can't run; judged by its JUnit report if it names one, else by its exit code. repeats: how
    often the judge's runs are repeated, per task (beside the first look at the mutation) and for the untouched package.
    """
    try:
        if path is not None:
            found = read(path, name or path.resolve().name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                tree = await asyncio.to_thread(fetch, package, Path(folder))
                found = read(tree, name or package.replace("==", "-"))
    except PackageError as error:
        raise SuiteError(str(error)) from None
    lab = Lab(acquire, release, f"suite-{found.name}", template)
    plan, expected, seconds = await baseline(lab, found, test_command, repeats, say)
    plan = msgspec.structs.replace(plan, timeout_s=limit(seconds))
    exam = await sealed(lab, found, Exam(plan=plan, expected=expected), say)
    say(f"{len(expected)} tests of {found.name} pass in {seconds:.1f} s; looking for {count} bugs that they notice")

    rng = random.Random(f"headrace/{found.name}/{seed}")
    pairs: list[tuple[Task, Oracle]] = []
    candidates = _candidates(found, rng)
    tried = 0
    # In step and in order: which bugs enter the suite may not depend on which sandbox is faster.
    while len(pairs) < count and (batch := candidates[tried : tried + parallel]):
        tried += len(batch)
        tasks = [attempt(lab, found, mutation, exam, repeats, seed, lane) for lane, mutation in enumerate(batch)]
        for mutation, made in zip(batch, await asyncio.gather(*tasks), strict=True):
            if made is not None and len(pairs) < count:
                pairs.append(made)
                say(f"{len(pairs)}/{count}: {mutation.kind} in {mutation.path}:{mutation.line} ({tried} tried)")
    if not pairs:
        raise SuiteError(f"no change of {found.name} was noticed by its tests ({tried} tried)")
    pairs.sort(key=lambda pair: pair[0].ref.task)
    return write_suite(found.name, root / found.name, pairs, package or str(path))


def _candidates(package: Package, rng: random.Random) -> list[Mutation]:
    """Mutations in random order, at most one a line, so that a suite is spread over the package."""
    found = [mutation for path in package.sources for mutation in mutations(path, package.files[path])]
    rng.shuffle(found)
    return list({(mutation.path, mutation.line): mutation for mutation in reversed(found)}.values())[::-1]


async def baseline(
    lab: Lab, package: Package, test_command: str, repeats: int, say: Callable[[str], None]
) -> tuple[TestPlan, tuple[str, ...], float]:
    """A plan whose tests all pass on the untouched package, every time; their names; seconds that it takes."""
    if test_command:
        plan = TestPlan(kind="command", argv=tuple(shlex.split(test_command)), timeout_s=_FIRST_RUN_S)
    else:
        plan = TestPlan(kind="pytest", paths=package.tests, timeout_s=_FIRST_RUN_S)
    result = await lab.run(package.files, plan)
    names = passed(result)
    if not names:
        broken = next((test.message for test in result.tests if test.message), result.error)
        raise SuiteError(f"no test of {package.name} passes in a sandbox: {broken[:300]}")
    bad = {test.name for test in result.tests if test.outcome != "passed"}
    if bad and not test_command:
        spoilt = {name.partition("::")[0] for name in bad}
        whole = [path for path in package.tests if path not in spoilt and any(n.startswith(f"{path}::") for n in names)]
        single = [name for name in names if name.partition("::")[0] in spoilt]
        say(f"{len(bad)} tests of {package.name} don't pass here and are left out, such as {min(bad)}")
        plan = msgspec.structs.replace(plan, paths=(*whole, *single))
    elif bad:
        raise SuiteError(f"{len(bad)} tests of {package.name} fail in a sandbox, such as {min(bad)}")
    seconds = result.wall_ms / 1e3
    for _ in range(1 + repeats):
        again = await lab.run(package.files, plan)
        if {test.name for test in again.tests} - set(passed(again)):
            raise SuiteError(f"the tests of {package.name} are not stable: {again.error}")
        if passed(again) != names:
            names = tuple(sorted(set(names) & set(passed(again))))
            raise SuiteError(f"the tests of {package.name} are not stable: {len(names)} of them ran twice")
        seconds = max(seconds, again.wall_ms / 1e3)
    return plan, names, seconds


async def sealed(lab: Lab, package: Package, exam: Exam, say: Callable[[str], None]) -> Exam:
    """The exam with its tests sealed, as far as the untouched package passes them so; else as it was."""
    if exam.plan.kind != "pytest":
        return exam
    used = {path.partition("::")[0] for path in exam.plan.paths}
    files = {path: package.files[path] for path in used}
    leave: frozenset[int] = frozenset()
    for _ in range(4):
        seals = sealing.seal(files, leave)
        result = await lab.run(package.files | seals.files, exam.plan)
        if passed(result) != exam.expected:
            break
        # Of what the tests see, the judge's runs hand out only so much, and leave out the rest in silence.
        tests = await everything(lab, package.files | seals.files, exam.plan) or result.tests
        if bad := sealing.unequal(seals, tests) | sealing.too_much(tests):
            leave |= bad
            continue
        tried = msgspec.structs.replace(exam, sealed=seals.files, answers=sealing.recorded(seals, result.tests))
        if passed(await lab.judge(package.files, tried)) != exam.expected:
            break
        say(f"{len(seals.literals)} of {seals.comparisons} assertions are sealed: their answers stay with the judge")
        return await recorded(lab, package, tried, seals, result.tests, say)
    say("the tests can't be sealed: what they expect goes into the sandbox")
    return exam


async def recorded(
    lab: Lab,
    package: Package,
    exam: Exam,
    seals: sealing.Sealed,
    tests: Sequence[TestOutcome],
    say: Callable[[str], None],
) -> Exam:
    """The exam with the values of the untouched code where two computed ones are compared, as far as they are always
    the same."""
    if not sealing.pairs(seals, exam.answers)[1]:
        return exam
    answers = await record(lab, package.files, exam.plan, seals, tests)
    tried = msgspec.structs.replace(exam, answers=answers)
    if passed(await lab.judge(package.files, tried)) != exam.expected:
        tried = exam
    known, both = sealing.pairs(seals, tried.answers)
    say(f"{known} of {both} comparisons of two computed values have those of the untouched code as their answer")
    return tried


async def attempt(
    lab: Lab, package: Package, mutation: Mutation, exam: Exam, repeats: int, seed: int, lane: int
) -> tuple[Task, Oracle] | None:
    """A verified task of a mutation, None when the tests don't notice it, can't run with it, or waver.

    What runs is what agent and judge will run: the judge's tree before and after the fix, the agent's before and after.
    """
    broken = package.files | {mutation.path: mutation.apply(package.files[mutation.path])}
    result = await lab.judge(broken, exam, lane)
    failing = _noticed(result, exam.expected)
    if not failing:
        return None
    task, oracle = assemble(package, mutation, exam, failing, seed)
    for _ in range(repeats):
        if _noticed(await lab.judge(task.files | oracle.hidden, exam, lane), exam.expected) != failing:
            return None
        if passed(await lab.judge(task.files | oracle.solution | oracle.hidden, exam, lane)) != exam.expected:
            return None
    before = await lab.run(task.files, task.tests, lane)
    after = await lab.run(task.files | oracle.solution, task.tests, lane)
    return (task, oracle) if not before.ok and not before.timed_out and after.ok else None


def _noticed(result: OpResult, expected: Sequence[str]) -> tuple[str, ...]:
    """Tests that fail, when all that should have run did run."""
    if result.timed_out or sorted(test.name for test in result.tests) != list(expected):
        return ()
    return tuple(sorted(set(expected) - set(passed(result))))


def assemble(
    package: Package,
    mutation: Mutation,
    exam: Exam,
    failing: Sequence[str],
    seed: int,
) -> tuple[Task, Oracle]:
    """Both sides of a task."""
    plan = exam.plan
    right = package.files[mutation.path]
    hidden_paths = {*package.tests, *package.support}
    open_files = {path: data for path, data in package.files.items() if path not in package.tests}
    if plan.kind == "pytest":
        used = {path.partition("::")[0] for path in plan.paths}
        keep = choose(exam.expected, failing, random.Random(f"headrace/{package.name}/{seed}/{mutation.start}"))
        visible = {}
        for path in sorted(used):
            kept = {name.partition("::")[2] for name in keep if name.partition("::")[0] == path}
            if kept:
                visible[path] = thin(package.files[path], kept)
        paths = tuple(p for p in plan.paths if p in visible or p.partition("[")[0] in keep)
        shown = [name for name in failing if name.partition("[")[0] in keep]
    else:
        visible, paths, shown = {path: package.files[path] for path in package.tests}, plan.paths, list(failing)
    ref = TaskRef(package.name, f"{mutation.path.removesuffix('.py').replace('/', '-')}-{mutation.start}")
    return (
        Task(
            ref=ref,
            family=f"mutation:{re.sub(r'-[0-9][^-]*$', '', package.name)}",
            prompt=_prompt(shown),
            files=open_files | visible | {mutation.path: mutation.apply(right)},
            allowed=package.sources,
            tests=msgspec.structs.replace(plan, paths=paths),
            template="debian",
        ),
        Oracle(
            ref=ref,
            hidden={path: package.files[path] for path in sorted(hidden_paths)},
            tests=plan,
            expected=exam.expected,
            sealed=exam.sealed,
            answers=exam.answers,
            solution={mutation.path: right},
        ),
    )


def _prompt(failing: Sequence[str]) -> str:
    few = [name for name in sorted(failing, key=len)[:2] if len(name) < 100]
    such = f", such as {' and '.join(few)}" if few and few != ["command"] else ""
    count = "A test fails" if len(failing) == 1 else f"{len(failing)} tests fail"
    return f"{count}{such}. Find the bug in the code and fix it."[:_PROMPT]
