"""Certifies a task: the judge examines its known solution, no change, an empty solution and broken solutions.

Every examination is `examination.examine`, as for a policy's attempt. A task is certified when the known solution
passes every time, no change and empty functions fail, and the agent's side does not hold the solution or the hidden
tests. A task without a known solution is uncertifiable: no examination can show whether its tests can be passed.

A broken solution is one mutation (tasks/packages/mutate.py) in a function that the solution changes. Some suites can
tell that a mutation behaves like the solution (method `equivalent`); such mutations do not count. In other suites some
mutations that pass may be equivalent to the solution, so their share is an upper bound of the tests' false acceptances.
A low share of refused mutations is a note in the certificate.
"""

import ast
import random
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import msgspec

from headrace.judging import checkers, rules
from headrace.judging.candidates import Candidate
from headrace.judging.examination import Options, Report, examine
from headrace.judging.machines import Machines
from headrace.messages.judging import Certificate
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import PolicyRef, Sampling, Trajectory
from headrace.messages.sandbox import Isolation, TestOutcome
from headrace.messages.tasks import ANSWER, Oracle, Task
from headrace.registry import merged
from headrace.tasks import leaks as scan
from headrace.tasks.base import Suite
from headrace.tasks.certificates import task_hash
from headrace.tasks.packages.mutate import mutations
from headrace.tasks.suites import suite_plugins

GOLD_RUNS = 5
MUTANTS = 6
"""Broken solutions of one task."""
KILLED = 0.8
"""Share of the broken solutions below which a certificate has a note."""
_LEAK = 40
"""Characters from which the solution's new text counts as leaked: shorter ones occur by chance."""

Files = dict[str, bytes]


async def certify(
    suite: Suite, id: str, machines: Machines[Any], report: Report, *, backend: str = "", isolation: Isolation = "group"
) -> Certificate:
    """The certificate of a task. SandboxLost, NoCapacity as in `examine`; UnknownSuite, PluginError."""
    task, oracle = suite.task(id), suite.oracle(id)
    made = Certificate(
        task=task.ref,
        task_hash=task_hash(task, oracle),
        judge_version=rules.VERSION,
        plugins=(*suite_plugins((suite.name,)), *checkers.used(oracle)),
        backend=backend,
        verdict="uncertifiable",
    )
    if why := _no_solution(task, oracle):
        return msgspec.structs.replace(made, reasons=(why,))
    exam = _Exam(task, oracle, machines, report, isolation)
    solution = {ANSWER: oracle.answer.encode()} if not task.sandbox else oracle.solution
    gold = [await exam.decision(solution, oracle.removed) for _ in range(GOLD_RUNS)]
    await exam.prepare(_required(oracle), solution, oracle.removed)
    noop = await exam.rejection({})
    if oracle.grading.kind == "exact" and noop != "passed":
        await exam.prepare(_noticing(oracle, exam.tests), solution, oracle.removed)
    broken = stubs(task.files, oracle.solution) if task.sandbox else {}
    stub = await exam.rejection(broken) if broken else ""
    drawn = mutants(task, oracle) if task.sandbox else []
    survivors, equivalent = [], 0
    same = getattr(suite, "equivalent", None)
    for name, files in drawn:
        if same is not None and same(id, files):
            equivalent += 1
        elif await exam.rejection(solution | files, oracle.removed) == "passed":
            survivors.append(name)
    tried = len(drawn) - equivalent
    made = msgspec.structs.replace(
        made,
        plugins=merged(made.plugins, exam.plugins),
        gold_runs=GOLD_RUNS,
        gold_passed=gold.count("passed"),
        noop=noop,
        stub=stub,
        mutants=tried,
        killed=tried - len(survivors),
        equivalent=equivalent,
        survivors=tuple(survivors),
        leaks=leaks(task, oracle),
    )
    reasons = _reasons(made)
    weak = f"the tests refuse {made.killed} of {tried} broken solutions, less than {KILLED:.0%}"
    notes = (weak,) if made.killed < KILLED * tried else ()
    return msgspec.structs.replace(made, verdict="refused" if reasons else "certified", reasons=reasons, notes=notes)


def _reasons(made: Certificate) -> tuple[str, ...]:
    """Why a task is not certified."""
    reasons = []
    if made.gold_passed < made.gold_runs:
        flaky = "flaky: " if made.gold_passed else ""
        reasons.append(f"{flaky}the known solution passes {made.gold_passed} of {made.gold_runs} times")
    if made.noop == "passed":
        reasons.append("the untouched repository passes")
    if made.stub == "passed":
        reasons.append("the solution with empty functions passes")
    return (*reasons, *made.leaks)


def _no_solution(task: Task, oracle: Oracle) -> str:
    """The reason why the task cannot be examined; empty if it can."""
    if task.image:
        return "the repository lies in a container image, whose solution is not examined"
    if oracle.steps:
        return "the task has steps, whose solutions are programs, which are not run"
    if oracle.script:
        return "the solution is a program, which is not run"
    if not (oracle.solution or oracle.removed or oracle.answer):
        return "there is no known solution"
    return ""


class _Exam:
    """Examinations of one task in fresh sandboxes."""

    def __init__(
        self, task: Task, oracle: Oracle, machines: Machines[Any], report: Report, isolation: Isolation
    ) -> None:
        self._task, self._oracle, self._machines, self._report = task, oracle, machines, report
        self._isolation: Isolation = isolation
        self._count = 0
        self.plugins: tuple[Plugin, ...] = ()
        """Sandbox backends of the examinations that come from outside of headrace."""
        self.tests: tuple[TestOutcome, ...] = ()
        """The outcomes of the latest examination."""
        self._few: Oracle | None = None

    async def prepare(self, few: Oracle | None, solution: Mapping[str, bytes], deleted: tuple[str, ...]) -> None:
        """Check whether these required tests are enough for a decision: the known solution passes them without the
        other tests."""
        if few is not None and await self._decide(few, solution, deleted) == "passed":
            self._few = few

    async def rejection(self, files: Mapping[str, bytes], deleted: tuple[str, ...] = ()) -> str:
        """The judge's decision on changes that should fail. One failed required test decides, so the few of `prepare`
        run first, and all tests run only where those pass."""
        if self._few is not None and (early := await self._decide(self._few, files, deleted)) != "passed":
            return early
        return await self.decision(files, deleted)

    async def decision(self, files: Mapping[str, bytes], deleted: tuple[str, ...] = ()) -> str:
        """The judge's decision on these changes."""
        return await self._decide(self._oracle, files, deleted)

    async def _decide(self, oracle: Oracle, files: Mapping[str, bytes], deleted: tuple[str, ...]) -> str:
        self._count += 1
        trajectory = Trajectory(
            run="certify",
            lane="eval",
            group=f"c{task_hash(self._task, self._oracle)[:16]}",
            slot=self._count,
            attempt=0,
            id=f"certify-{self._count}",
            task=self._task.ref,
            family=self._task.family,
            seed=self._count,
            policy=PolicyRef(),
            sampling=Sampling(),
            outcome="finished",
            turns=(),
            diff=dict(files),
            deleted=deleted,
            isolation=self._isolation,
        )
        candidate = Candidate(trajectory=trajectory, task=self._task, oracle=oracle)
        verdict = await examine(candidate, self._machines, self._report, Options())
        self.plugins = merged(self.plugins, verdict.plugins)
        self.tests = verdict.tests
        return verdict.decision


def _required(oracle: Oracle) -> Oracle | None:
    """The oracle with its required tests alone; None where pytest cannot select them, or where they are most of the
    tests."""
    keep = oracle.grading.pass_to_pass
    by_name = oracle.tests.kind == "pytest" and oracle.grading.kind == "f2p_p2p" and not oracle.grading.parser
    if not by_name or len(oracle.expected) > len(keep):
        return None
    functions = tuple(sorted({name.partition("[")[0] for name in oracle.expected}))
    return msgspec.structs.replace(
        oracle,
        tests=msgspec.structs.replace(oracle.tests, paths=functions),
        grading=msgspec.structs.replace(oracle.grading, pass_to_pass=()),
    )


def _noticing(oracle: Oracle, tests: Sequence[TestOutcome]) -> Oracle | None:
    """The oracle with the test functions alone that fail over the untouched repository, for a task that requires every
    test: a broken solution most likely fails one of them as well. None where pytest cannot select them, or where they
    hold most of the tests."""
    if oracle.tests.kind != "pytest" or oracle.grading.parser:
        return None
    functions = {test.name.partition("[")[0] for test in tests if test.outcome in ("failed", "error")}
    expected = tuple(name for name in oracle.expected if name.partition("[")[0] in functions)
    if not expected or 2 * len(expected) > len(oracle.expected):
        return None
    paths = tuple(sorted({name.partition("[")[0] for name in expected}))
    return msgspec.structs.replace(oracle, tests=msgspec.structs.replace(oracle.tests, paths=paths), expected=expected)


def _changed_functions(before: bytes, after: bytes) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The innermost functions of `after` with a line that differs from `before`. None of them for text that is not
    Python."""
    try:
        tree = ast.parse(after)
    except (SyntaxError, ValueError):
        return []
    old, new = before.splitlines(), after.splitlines()
    lines: set[int] = set()
    for kind, _, _, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            lines.update(range(first + 1, max(last, first + 1) + 1))
    functions: dict[int, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for line in lines:
        around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
        if around:
            inner = max(around, key=lambda node: node.lineno)
            functions[inner.lineno] = inner
    return [functions[line] for line in sorted(functions)]


def stubs(files: Mapping[str, bytes], solution: Mapping[str, bytes]) -> Files:
    """The solution with ``return None`` as the body of every function that it changes; empty without one."""
    made: Files = {}
    for path, content in solution.items():
        functions = _changed_functions(files.get(path, b""), content) if path.endswith(".py") else []
        lines = content.decode("utf-8", "replace").splitlines()
        for function in reversed(functions):
            first = function.body[0]
            if first.lineno == function.lineno:  # a body on the line of its def
                continue
            lines[first.lineno - 1 : function.end_lineno] = [" " * first.col_offset + "return None"]
            made[path] = ("\n".join(lines) + "\n").encode()
    return made


def mutants(task: Task, oracle: Oracle) -> list[tuple[str, Files]]:
    """Broken solutions by name, drawn by the task's id among all mutations of the functions that the solution changes;
    the task's own bug is not among them."""
    candidates: list[tuple[str, Files]] = []
    for path, content in sorted(oracle.solution.items()):
        if not path.endswith(".py"):
            continue
        before = task.files.get(path, b"")
        ranges = [(f.body[0].lineno, f.end_lineno or f.lineno) for f in _changed_functions(before, content)]
        for mutation in mutations(path, content):
            if any(first <= mutation.line <= last for first, last in ranges):
                broken = mutation.apply(content)
                if broken != before:
                    name = f"{path}:{mutation.line}: {mutation.before} -> {mutation.after}"
                    candidates.append((name, {path: broken}))
    random.Random(f"certify/{task.ref.suite}/{task.ref.task}").shuffle(candidates)
    return candidates[:MUTANTS]


def leaks(task: Task, oracle: Oracle) -> tuple[str, ...]:
    """Parts of the solution or of the hidden tests that the prompt or the agent's files contain."""
    reasons = []
    # A file whose tests are all to be kept may be shown: it passes without the solution.
    decisive = {path for path in oracle.hidden if any(name.startswith(f"{path}::") for name in oracle.expected)}
    hidden = {content for path, content in oracle.hidden.items() if path in decisive or not decisive}
    reasons += [f"{path} is a hidden test file" for path, content in sorted(task.files.items()) if content in hidden]
    reasons += [f"the prompt names the hidden test {name}" for name in oracle.expected if name in task.prompt]
    for path, content in sorted(oracle.solution.items()):
        before = task.files.get(path, b"")
        if content.strip() and len(content) >= _LEAK:
            twins = [other for other, text in sorted(task.files.items()) if content.strip() in text]
            reasons += [f"{twin} holds the solution of {path}" for twin in twins]
        others = {other: text for other, text in task.files.items() if other not in oracle.solution}
        blocks = scan.added(before, content)
        reasons += list(scan.remains(others | {path: before}, blocks))
        added = max(blocks, key=len, default="").strip()
        if len(added) >= _LEAK and added in task.prompt:
            reasons.append(f"the prompt holds the solution of {path}")
    return tuple(reasons)
