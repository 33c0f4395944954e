"""Mutations of a package as tasks: a change that the package's own tests notice.

A task's hidden tests are the package's own. The agent gets the sources and about half of the test functions, always
with one that fails, so that there is a symptom to follow and something left to be judged by (packages/visible.py).
"""

import random
import re
from collections.abc import Sequence

import msgspec

from headrace.messages.tasks import Oracle, Task, TaskRef
from headrace.tasks.making.journal import NoTask
from headrace.tasks.packages.fetch import Package
from headrace.tasks.packages.lab import Exam, Lab, passed
from headrace.tasks.packages.mutate import Mutation, mutations
from headrace.tasks.packages.visible import choose, thin

PROMPT = "Tests fail. Run them, find the bug in the code and fix it."
"""Without names: a prompt that names a hidden test is a leak (judging/solutions/leaks.py)."""


def candidates(package: Package, seed: int) -> list[Mutation]:
    """Mutations in random order, at most one a line, so that a suite is spread over the package."""
    found = [mutation for path in package.sources for mutation in mutations(path, package.files[path])]
    random.Random(f"headrace/{package.name}/{seed}").shuffle(found)
    return list({(mutation.path, mutation.line): mutation for mutation in reversed(found)}.values())[::-1]


def id_of(package: Package, mutation: Mutation) -> str:
    """The task's id."""
    return f"{package.name}--{mutation.path.removesuffix('.py').replace('/', '-')}-{mutation.start}"


async def attempt(
    lab: Lab, package: Package, mutation: Mutation, exam: Exam, suite: str, seed: int
) -> tuple[Task, Oracle]:
    """Both sides of a mutation's task. NoTask where the tests don't notice it, can't run with it, or where no test that
    the agent gets shows it."""
    broken = package.files | {mutation.path: mutation.apply(package.files[mutation.path])}
    result = await lab.judge(broken, exam)
    failing = tuple(sorted(set(exam.expected) - set(passed(result))))
    if result.timed_out or sorted(test.name for test in result.tests) != list(exam.expected):
        raise NoTask("the tests do not run with it")
    if not failing:
        raise NoTask("no test notices it")
    task, oracle = assemble(package, mutation, exam, failing, suite, seed)
    after = await lab.run(task.files | oracle.solution, task.tests)
    before = await lab.run(task.files, task.tests)
    bad = {test.name for test in before.tests if test.outcome in ("failed", "error")}
    if not after.ok or before.timed_out or not {*passed(after)} & {*failing} & bad:
        raise NoTask("no test that the agent gets shows it")
    return task, oracle


def assemble(
    package: Package,
    mutation: Mutation,
    exam: Exam,
    failing: Sequence[str],
    suite: str,
    seed: int,
) -> tuple[Task, Oracle]:
    """Both sides of a task."""
    plan = exam.plan
    right = package.files[mutation.path]
    hidden_paths = {*package.tests, *package.support}
    open_files = {path: data for path, data in package.files.items() if path not in package.tests}
    used = {path.partition("::")[0] for path in plan.paths}
    keep = choose(exam.expected, failing, random.Random(f"headrace/{package.name}/{seed}/{mutation.start}"))
    visible = {}
    for path in sorted(used):
        functions = {name.partition("::")[2] for name in keep if name.partition("::")[0] == path}
        if functions:
            visible[path] = thin(package.files[path], functions)
    paths = tuple(p for p in plan.paths if p in visible or p.partition("[")[0] in keep)
    ref = TaskRef(suite, id_of(package, mutation))
    return (
        Task(
            ref=ref,
            family=f"mutation:{re.sub(r'-[0-9][^-]*$', '', package.name)}",
            prompt=PROMPT,
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
