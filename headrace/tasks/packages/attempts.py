"""Mutations of a package as tasks: a change that the package's own tests notice.

A task's hidden tests are the package's own. The agent gets the sources and about half of the test functions, always
with one that fails: if all were visible, a repair that satisfies just them could not be told from a real one; if none
that fails were, there would be no symptom.
"""

import ast
import random
import re
from collections.abc import Collection, Sequence

import msgspec

from headrace.messages.tasks import Oracle, Task, TaskRef
from headrace.syntax_trees import parsed
from headrace.tasks.making.journal import NoTask
from headrace.tasks.packages.fetch import Package
from headrace.tasks.packages.lab import Exam, Lab, passed
from headrace.tasks.packages.mutate import Mutation, mutations

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


def _function(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


def choose(names: Sequence[str], failing: Sequence[str], rng: random.Random) -> frozenset[str]:
    """Functions (``path::function`` or ``path::Class::method``) to show: half of all, and of the failing ones at least
    one but, where there are two or more, not all."""
    bad = sorted({_function(name) for name in failing})
    good = sorted({_function(name) for name in names} - set(bad))
    shown = rng.sample(bad, max(1, len(bad) // 2)) + rng.sample(good, len(good) // 2)
    return frozenset(shown)


def thin(source: bytes, keep: Collection[str]) -> bytes:
    """A test file without the test functions that are not in `keep` (``function`` or ``Class::method``).

    A function that is used by name stays: tests call and wrap each other.
    """
    tree = parsed(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    lines = source.splitlines(keepends=True)
    drop: set[int] = set()
    filled: dict[int, bytes] = {}

    def cut(body: Sequence[ast.stmt], prefix: str) -> int:
        """Mark the statements to remove; return the number of the others."""
        left = len(body)
        for node in body:
            assert node.end_lineno is not None
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("test") and prefix + node.name not in keep and node.name not in used:
                    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    drop.update(range(start, node.end_lineno + 1))
                    left -= 1
            elif isinstance(node, ast.ClassDef) and not cut(node.body, f"{prefix}{node.name}::"):
                first = node.body[0].lineno
                filled[first] = b" " * node.body[0].col_offset + b"pass\n"
        return left

    cut(tree.body, "")
    return b"".join(
        filled[number] if number in filled else line
        for number, line in enumerate(lines, 1)
        if number in filled or number not in drop
    )
