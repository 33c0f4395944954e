"""Whether a mutation makes a task, tried in sandboxes: several at once, and accepted in their order."""

import asyncio
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence, Set
from typing import TypeVar

import msgspec

from headrace.messages.sandbox import OpResult
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks.packages.fetch import Package
from headrace.tasks.packages.lab import Exam, Lab, passed
from headrace.tasks.packages.mutate import Mutation
from headrace.tasks.packages.visible import choose, thin

_FEW = 0.5
"""Largest share of the tests that run before the whole: of more, the whole runs at once."""
_PROMPT = 300
"""Characters of a prompt: it has to fit into the smallest context in use."""

_C = TypeVar("_C")
_R = TypeVar("_R")


async def in_order(
    candidates: Sequence[_C], attempt: Callable[[_C, int], Awaitable[_R]], parallel: int
) -> AsyncGenerator[tuple[_C, _R], None]:
    """Each candidate with the result of its attempt, in the candidates' order, whichever sandbox is faster; `parallel`
    of them run at once. Close it when enough results came: attempts that still run are cancelled. attempt: also gets
    its lane, which no other attempt has meanwhile.
    """
    free = list(range(parallel))
    running: dict[int, asyncio.Task[_R]] = {}
    started = 0
    lanes: dict[asyncio.Task[_R], int] = {}

    async def run(candidate: _C, lane: int) -> _R:
        return await attempt(candidate, lane)

    try:
        for number, candidate in enumerate(candidates):
            while number not in running or not running[number].done():
                while free and started < len(candidates):
                    task = asyncio.create_task(run(candidates[started], lane := free.pop(0)))
                    running[started], lanes[task] = task, lane
                    started += 1
                done, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
                free += [lanes.pop(task) for task in done]
            yield candidate, await running.pop(number)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def attempt(
    lab: Lab,
    package: Package,
    mutation: Mutation,
    exam: Exam,
    repeats: int,
    seed: int,
    lane: int,
    near: Set[str] | None = None,
) -> tuple[Task, Oracle] | None:
    """A verified task of a mutation, None when the tests don't notice it, can't run with it, or waver.

    What runs is what agent and judge will run: the judge's tree before and after the fix, the agent's before and after.
    near: the tests that can notice it, where that is known: they run first, and count as one repetition.
    """
    broken = package.files | {mutation.path: mutation.apply(package.files[mutation.path])}
    first: tuple[str, ...] | None = None
    few = sorted({*exam.expected} & near) if near is not None else []
    if near is not None and len(few) <= _FEW * len(exam.expected):
        if not few:
            return None
        first = _noticed(_only(await lab.judge(broken, _narrow(exam, few), lane), few), few)
        if not first:
            return None
    failing = _noticed(await lab.judge(broken, exam, lane), exam.expected)
    if not failing or (first is not None and {*first} != {*failing} & {*few}):
        return None
    task, oracle = assemble(package, mutation, exam, failing, seed)
    right = task.files | oracle.solution | oracle.hidden
    for repeat in range(repeats):
        again = first is None or repeat
        if again and _noticed(await lab.judge(task.files | oracle.hidden, exam, lane), exam.expected) != failing:
            return None
        # The untouched package has passed this exam: baseline() and sealed() ran it.
        if right != package.files and passed(await lab.judge(right, exam, lane)) != exam.expected:
            return None
    after = await lab.run(task.files | oracle.solution, task.tests, lane)
    shown = {*passed(after)} & {*failing}
    if not after.ok or not shown:
        return None
    before = await lab.run(task.files, _of(task.tests, shown), lane)
    bad = {test.name for test in before.tests if test.outcome in ("failed", "error")}
    return (task, oracle) if bad & shown and not before.timed_out else None


def _of(plan: TestPlan, names: Collection[str]) -> TestPlan:
    """A plan of the test functions of these names alone, with all their parameters; a command stays as it is."""
    if plan.kind != "pytest":
        return plan
    return msgspec.structs.replace(plan, paths=tuple(sorted({name.partition("[")[0] for name in names})))


def _narrow(exam: Exam, names: Sequence[str]) -> Exam:
    return msgspec.structs.replace(exam, plan=_of(exam.plan, names), expected=tuple(names))


def _only(result: OpResult, names: Sequence[str]) -> OpResult:
    """Without other parameters of the functions that ran."""
    tests = tuple(test for test in result.tests if test.name in set(names))
    return msgspec.structs.replace(result, tests=tests)


def _noticed(result: OpResult, expected: Sequence[str]) -> tuple[str, ...]:
    """The failed tests of a run in which every expected test ran."""
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
            functions = {name.partition("::")[2] for name in keep if name.partition("::")[0] == path}
            if functions:
                visible[path] = thin(package.files[path], functions)
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
