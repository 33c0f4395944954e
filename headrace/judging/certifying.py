"""Certifies a task: the judge examines its known solution, no change, an empty solution and broken solutions.

Every examination is `examination.examine`, as for a policy's attempt. A task is certified when the known solution
passes every time, no change and empty functions fail, and the agent's side does not hold the solution or the hidden
tests. A task without a known solution is uncertifiable: no examination can show whether its tests can be passed.

A solution that is a program, or that belongs into a container image, is first made in a sandbox (solutions/known.py).
The examinations get the changes that were pulled from there.

A broken solution is one mutation (tasks/packages/mutate.py) in a function that the solution changes. Some suites can
tell that a mutation behaves like the solution (method `equivalent`); such mutations do not count. In other suites some
mutations that pass may be equivalent to the solution, so their share is an upper bound of the tests' false acceptances.
A low share of refused mutations is a note in the certificate. A task whose pass may prove no repair, although its known
solution passes, is certified with a risk (judging/hidden).
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from headrace.judging import checkers, rules
from headrace.judging.candidates import Candidate
from headrace.judging.examination import Options, ReportEvent, examine
from headrace.judging.hidden.control import unproven
from headrace.judging.hidden.setup import DECLARE, loads_itself
from headrace.judging.machines import Machines
from headrace.judging.solutions import broken, leaks
from headrace.judging.solutions.known import AgentSandboxes, NoSolution, Solution
from headrace.judging.verdicts import NoVerdict, Verdict
from headrace.messages.judging import Certificate
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import PolicyRef, Sampling, Trajectory
from headrace.messages.sandbox import Isolation, ReadFile, Snapshot, TestOutcome
from headrace.messages.tasks import Oracle, Task
from headrace.registry import merged
from headrace.tasks.base import Suite
from headrace.tasks.certificates import task_hash
from headrace.tasks.suites import suite_plugins

GOLD_RUNS = 5
MUTANTS = 6
"""Broken solutions of one task."""
KILLED = 0.8
"""Share of the broken solutions below which a certificate has a note."""
_DECLARED = 1 << 20
_BLIND = "its altered tests pass over the known solution, so a pass may come from the candidate's own report"
NO_MUTANTS = "the solution changes no Python function, so no broken solution was tried"


async def certify(
    suite: Suite,
    id: str,
    machines: Machines[Any],
    report: ReportEvent,
    *,
    backend: str = "",
    isolation: Isolation = "group",
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
    if why := _no_solution(oracle):
        return msgspec.structs.replace(made, reasons=(why,), notes=_left_out(oracle))
    exam = _Exam(task, oracle, machines, report, isolation)
    try:
        solution = await exam.sandboxes.known()
    except NoSolution as error:
        return msgspec.structs.replace(
            made,
            verdict="refused",
            plugins=exam.used(made),
            reasons=(str(error),),
            notes=_left_out(oracle),
            output=error.output or UNSET,
        )
    gold = [await exam.decision(solution) for _ in range(GOLD_RUNS)]
    why, blind, output = exam.why, exam.blind, exam.output
    await exam.prepare(_required(oracle), solution)
    noop = await exam.rejection(Solution(earlier=tuple(Snapshot(diff={}) for _ in task.later)))
    output = output or (exam.printed if noop == "passed" else "")
    if oracle.grading.kind == "exact" and noop != "passed":
        await exam.prepare(_noticing(oracle, exam.tests), solution)
    before, repaired = solution.before(task), solution.repaired(task)
    empty = broken.stubs(before, repaired) if task.sandbox else {}
    stub = await exam.rejection(solution.only(empty)) if empty else ""
    output = output or (exam.printed if stub == "passed" else "")
    drawn = broken.mutants(task.ref, before, repaired)[:MUTANTS] if task.sandbox and "passed" in gold else []
    survivors, equivalent = [], 0
    same = getattr(suite, "equivalent", None)
    for name, files in drawn:
        if same is not None and same(id, files):
            equivalent += 1
        elif await exam.rejection(solution.over(files)) == "passed":
            survivors.append(name)
    tried = len(drawn) - equivalent
    secret = with_hidden(oracle)
    gone = solution.last.deleted
    leaked = leaks.told(task, secret, before, repaired if task.sandbox else {}, gone)
    searched, declared = leaks.Found(), dict[str, bytes]()
    if task.image:
        async with exam.sandboxes.sandbox() as sandbox:
            searched = await leaks.in_image(sandbox, secret, repaired, gone)
            declared = {path: (await sandbox.call(ReadFile(path=path, limit=_DECLARED))).data for path in DECLARE}
    risks = unproven(oracle) or _BLIND * blind, loads_itself(task, oracle, solution.last, declared)
    made = msgspec.structs.replace(
        made,
        plugins=exam.used(made),
        gold_runs=GOLD_RUNS,
        gold_passed=gold.count("passed"),
        noop=noop,
        stub=stub,
        mutants=tried,
        killed=tried - len(survivors),
        equivalent=equivalent,
        survivors=tuple(survivors),
        leaks=(*leaked.leaks, *searched.leaks),
        risks=tuple(filter(None, risks)) or UNSET,
    )
    reasons = _reasons(made, why)
    notes = []
    if made.killed < KILLED * tried:
        notes.append(f"the tests refuse {made.killed} of {tried} broken solutions, less than {KILLED:.0%}")
    elif task.sandbox and not drawn and "passed" in gold:
        notes.append(NO_MUTANTS)
    notes += (*leaked.notes, *searched.notes, *_left_out(oracle))
    verdict: Literal["certified", "refused"] = "refused" if reasons else "certified"
    return msgspec.structs.replace(made, verdict=verdict, reasons=reasons, notes=tuple(notes), output=output or UNSET)


def _left_out(oracle: Oracle) -> tuple[str, ...]:
    """Notes of the task's import about files and settings that the task lacks."""
    return tuple(f"import: {note}" for note in oracle.left_out or ())


def _reasons(made: Certificate, why: str) -> tuple[str, ...]:
    """Why a task is not certified. why: the reason of an examination that the known solution did not pass."""
    reasons = []
    if made.gold_passed < made.gold_runs:
        flaky = "flaky: " if made.gold_passed else ""
        judged = f": {why}" if why else ""
        reasons.append(f"{flaky}the known solution passes {made.gold_passed} of {made.gold_runs} times{judged}")
    if made.noop == "passed":
        reasons.append("the untouched repository passes")
    if made.stub == "passed":
        reasons.append("the solution with empty functions passes")
    return (*reasons, *made.leaks)


def _no_solution(oracle: Oracle) -> str:
    """The reason why there is nothing to examine; empty if there is a known solution."""
    if oracle.steps:
        lacking = next((step.name for step in oracle.steps.tests if not step.script), "")
        return f"there is no known solution of the step {lacking}" if lacking else ""
    solved = oracle.solution or oracle.removed or oracle.script or oracle.answer
    return "" if solved else "there is no known solution"


def with_hidden(oracle: Oracle) -> Oracle:
    """The oracle with the hidden files of all steps, which have the same paths in each."""
    if not oracle.steps:
        return oracle
    hidden = {f"steps/{step.name}/{path}": data for step in oracle.steps.tests for path, data in step.hidden.items()}
    return msgspec.structs.replace(oracle, hidden=hidden)


class _Exam:
    """Examinations of one task in fresh sandboxes."""

    def __init__(
        self, task: Task, oracle: Oracle, machines: Machines[Any], report: ReportEvent, isolation: Isolation
    ) -> None:
        self._task, self._oracle, self._machines, self._report = task, oracle, machines, report
        self._isolation: Isolation = isolation
        self._count = 0
        self._plugins: tuple[Plugin, ...] = ()
        """Sandbox backends of the examinations that come from outside of headrace."""
        self.sandboxes = AgentSandboxes(task, oracle, machines, Options().lease_s)
        self.tests: tuple[TestOutcome, ...] = ()
        """The outcomes of the latest examination."""
        self.blind = False
        """Whether altered tests pass over the known solution."""
        self.why = ""
        """The reason of the latest examination that was not passed; empty where only the number tells."""
        self.output = self.printed = ""
        """The ends of the output of the latest examination that was not passed, and of the latest one."""
        self._few: Oracle | None = None

    def used(self, made: Certificate) -> tuple[Plugin, ...]:
        """The plugins of a certificate, and those of its sandboxes."""
        return merged(made.plugins, self._plugins, tuple(self.sandboxes.plugins))

    async def prepare(self, few: Oracle | None, solution: Solution) -> None:
        """Check whether these required tests are enough for a decision: the known solution passes them without the
        other tests."""
        if few is not None and await self._decide(few, solution) == "passed":
            self._few = few

    async def rejection(self, solution: Solution) -> str:
        """The judge's decision on changes that should fail. One failed required test decides, so the few of `prepare`
        run first, and all tests run only where those pass."""
        if self._few is not None and (early := await self._decide(self._few, solution)) != "passed":
            return early
        return await self.decision(solution)

    async def decision(self, solution: Solution) -> str:
        """The judge's decision on these changes."""
        return await self._decide(self._oracle, solution)

    async def _decide(self, oracle: Oracle, solution: Solution) -> str:
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
            earlier=solution.earlier if self._task.later else UNSET,
            isolation=self._isolation,
            **msgspec.structs.asdict(solution.last),
        )
        candidate = Candidate(trajectory=trajectory, task=self._task, oracle=oracle)
        try:
            verdict = await examine(candidate, self._machines, self._report, Options())
        except NoVerdict as error:
            self.why = f"{error.reason}: {error}"[:500]
            self.output = self.printed = ""
            return "failed"
        self._plugins = merged(self._plugins, verdict.plugins)
        self.tests = verdict.tests
        self.blind |= f"{rules.BLIND}:tests" in verdict.suspicions
        self.printed = verdict.output
        if not verdict.passed:
            self.why, self.output = _why(oracle, verdict), verdict.output
        return verdict.decision


def _why(oracle: Oracle, verdict: Verdict) -> str:
    """Why a verdict is no pass."""
    if verdict.decision != "failed":
        return f"{verdict.decision} {', '.join(verdict.suspicions)}".strip()
    if verdict.reason:
        return verdict.reason
    outcomes = {test.name: test.outcome for test in verdict.tests}
    missing = [name for name in oracle.expected if outcomes.get(name) != "passed"]
    missing += [name for name in oracle.grading.pass_to_pass if outcomes.get(name) not in ("passed", "skipped")]
    if not missing:
        return ""
    more = f", nor do {len(missing) - 1} others" if len(missing) > 1 else ""
    return f"{missing[0]} does not pass ({outcomes.get(missing[0], 'not reported')}){more}"


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
