"""The one judge: runs the hidden tests in fresh sandboxes, reads their report, and makes the verdict. The judge actor,
re-judging and evaluation call the same function.

A sandbox gets the task's repository, the allowed part of the diff and the hidden tests in one frame, runs the tests
once and is never used again. With group isolation the candidates of a group share one machine, frozen before any test
is sent. A share of those verdicts, and all suspicious ones, are made again in a machine of the candidate's own; two
that differ show that one candidate reached another, and the curriculum drops the group. After the tests the host checks
the machine from outside (`CheckIntegrity`): a verdict from a machine that was changed is not used, and a candidate that
changes a machine of its own has cheated.

A candidate that passes runs once more, with altered tests that no repair passes (judging/hidden/control.py).

Every step of a task with steps is examined like an attempt (judging/steps.py). A verifier with an image of its own gets
the artifacts of a fresh sandbox of the task's image, in which the candidate's changes were made (judging/artifacts.py).

Whatever a candidate does has a verdict: output outside the bounds is the candidate's (judging/outcomes.py), a machine
that dies twice under a candidate is a crash of the candidate. Faults of our own parts give no verdict (`NoVerdict`): a
checker that raises or exceeds its time limit, and an exception while the judge processes a candidate's data. Sandboxes
that our own parts lose are infrastructure failures.
"""

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from headrace.judging import artifacts, checkers, rules, steps
from headrace.judging.candidates import Candidate, from_root, image_changes, repository, repository_entries
from headrace.judging.grading import LARGEST, examined, tail
from headrace.judging.hidden.control import Altered, control
from headrace.judging.machines import Machines, S
from headrace.judging.outcomes import RefusedOutput
from headrace.judging.solutions.known import AgentSandboxes, NoSolution
from headrace.judging.verdicts import Control, Examination, NoVerdict, Verdict, conclude, passes
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import Trajectory
from headrace.messages.sandbox import (
    Acquire,
    ApplyChanges,
    CheckIntegrity,
    Exec,
    FilesRefused,
    Isolation,
    NoCapacity,
    OpResult,
    PushTar,
    ReadFile,
    RunTests,
    Sandbox,
    SandboxLost,
)
from headrace.messages.tasks import ANSWER, Oracle, Verifier
from headrace.sandboxes.calls import NodeSilent, Superseded
from headrace.tasks.sandboxes import for_task, write

TRIES = 3
"""Number of sandboxes of one candidate that our own parts may lose before the judge gives up."""
CONTROL_ATTEMPT = 1 << 24
"""Added to an attempt's number for the sandbox of altered tests."""
RETRY_S = 0.5
"""Pause before another sandbox is asked for, times the number of failures."""


class ReportEvent(Protocol):
    """Where events go; `Actor.event` is one."""

    async def __call__(
        self, kind: str, text: str = "", level: Literal["info", "warning", "error"] = "info", /, **data: Any
    ) -> None:
        """Publish one event."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a candidate is examined."""

    again: bool = False
    """Examine it a second time even where nothing is suspicious (group isolation alone)."""
    lease_s: float = 120.0


async def examine(candidate: Candidate, machines: Machines[S], report: ReportEvent, options: Options) -> Verdict:
    """The verdict on a candidate.

    Raises NoVerdict where our own code fails, SandboxLost (Superseded when another judge works on the same candidate)
    or NoCapacity where our own parts failed `TRIES` times, PluginError where the task's checker cannot be used, and
    whatever the machines' own transport raises. Nothing that a candidate sends raises.
    """
    verdicts: list[Verdict] = []
    for part in steps.parts(candidate):
        examiner = _Examiner(part, candidate, machines, report, options)
        verdict = await examiner.verdict()
        verdicts.append(
            msgspec.structs.replace(verdict, plugins=tuple(examiner.plugins), machines=tuple(examiner.made_of))
        )
        if steps.ends(candidate, verdicts):
            break
    return steps.combined(candidate, verdicts)


class _CandidateDied(Exception):
    """The machine went down while the candidate's code ran in it."""


class _NotApplied(Exception):
    """The candidate's changes cannot be made in a fresh sandbox."""


class _Examiner:
    """The examinations of one candidate."""

    def __init__(
        self, candidate: Candidate, whole: Candidate, machines: Machines[Any], report: ReportEvent, options: Options
    ) -> None:
        """whole: the attempt at all steps of its task; the candidate itself where the task has no steps."""
        self.whole = whole
        self.candidate, self.machines, self.report, self.options = candidate, machines, report, options
        self.plugins: dict[Plugin, None] = {}
        """Backends from outside of headrace that made its sandboxes, in their order."""
        self.made_of: dict[tuple[str, str], None] = {}
        """Backend and content address of its machines, in their order."""
        self.where = {"group": candidate.trajectory.group, "slot": candidate.trajectory.slot}

    async def verdict(self) -> Verdict:
        trajectory, task, oracle = self.candidate.trajectory, self.candidate.task, self.candidate.oracle
        try:
            suspicions = rules.suspicions(task, oracle, trajectory.diff, trajectory.touched, trajectory.originals)
            suspicions += rules.behaviour(task, trajectory)
            # In an image the candidate's changes and the hidden tests follow once the sandbox is acquired.
            files = task.files if task.image else repository(task, oracle, trajectory.diff, trajectory.deleted)
        except Exception as error:
            raise _fault(error) from error
        if oracle.grading.kind == "checker":
            return await self._checked(suspicions)
        first = await self._examination(files, trajectory.isolation, thorough=bool(suspicions))
        unsure = bool(suspicions or first.touched or first.refused)
        second = None
        if trajectory.isolation == "group" and not first.crashed and (unsure or self.options.again):
            second = await self._second(files, first, unsure)
        await self._report_touched(first, second)
        again = await self._compare(first, second)
        last = second or first
        counted = last if first.touched or last.touched else first
        counted = msgspec.structs.replace(counted, control=await self._control(counted))
        return conclude(oracle, counted, suspicions, again=again)

    async def _control(self, real: Examination) -> Control:
        """Whether a candidate that passes, or has a part of the reward, passes altered tests as well; then also whether
        the known solution does, because a command may not run the tests that were altered."""
        trajectory, oracle = self.candidate.trajectory, self.candidate.oracle
        if not real.ok and (real.value or 0.0) <= (oracle.grading.lowest or 0.0):
            return ""
        try:
            altered = control(oracle, trajectory.diff)
        except Exception as error:
            raise _fault(error) from error
        if altered is None or not altered.passed(await self._other(trajectory, altered.oracle, "control"), real):
            return ""
        if not await self._known_fails(altered, real):
            await self.report("control_blind", f"{trajectory.id}: its altered tests prove nothing", "warning")
            return "blind"
        text = f"{trajectory.id} passes altered tests, which no repair can pass: what passed was not the repair"
        await self.report("control_passed", text, "error", **self.where)
        return "passed"

    async def _known_fails(self, altered: Altered, real: Examination) -> bool:
        """Whether the known solution passes the tests, and fails the altered ones that a candidate passed. real: the
        examination of the candidate, whose part of the reward the known solution must not get from them either."""
        trajectory, whole = self.candidate.trajectory, self.whole
        sandboxes = AgentSandboxes(whole.task, whole.oracle, self.machines, self.options.lease_s, trajectory.run)
        try:
            solution = await sandboxes.known()
        except NoSolution:
            return False
        step = trajectory.attempt // steps.STEP if whole.oracle.steps else 0
        changes = msgspec.structs.asdict([*solution.earlier, solution.last][step])
        solved = msgspec.structs.replace(trajectory, group=f"{trajectory.group}-{trajectory.slot}-known", **changes)
        if not (await self._other(solved, self.candidate.oracle, "known")).ok:
            return False
        return not altered.passed(await self._other(solved, altered.oracle, "known-control"), real)

    async def _other(self, trajectory: Trajectory, oracle: Oracle, name: str) -> Examination:
        """The examination of other changes or by other tests."""
        task = self.candidate.task
        try:
            files = task.files if task.image else repository(task, oracle, trajectory.diff, trajectory.deleted)
        except Exception as error:
            raise _fault(error) from error
        attempt = trajectory.attempt + CONTROL_ATTEMPT * (1 + name.endswith("-control"))
        again = msgspec.structs.replace(trajectory, id=f"{trajectory.id}-{name}", attempt=attempt)
        candidate = Candidate(trajectory=again, task=task, oracle=oracle)
        examiner = _Examiner(candidate, self.whole, self.machines, self.report, self.options)
        examination = await examiner._examination(files, trajectory.isolation, thorough=False)
        self.plugins.update(examiner.plugins)
        self.made_of.update(examiner.made_of)
        return examination

    async def _checked(self, suspicions: tuple[str, ...]) -> Verdict:
        """The verdict on a message: the checker's number, without a sandbox. PluginError when it has no checker."""
        trajectory, task, oracle = self.candidate.trajectory, self.candidate.task, self.candidate.oracle
        text = trajectory.diff.get(ANSWER, b"").decode("utf-8", "replace")
        try:
            value = await checkers.check(oracle, task.prompt, text)
        except checkers.CheckerError as error:
            raise NoVerdict("reward_error", str(error)) from error
        return conclude(oracle, Examination(ok=passes(oracle, (), value), value=value), suspicions)

    async def _second(self, files: dict[str, bytes], first: Examination, unsure: bool) -> Examination | None:
        """The examination in a machine of the candidate's own; None where our own parts failed. Then the first
        examination counts; if its machine was changed, the failure is raised instead: SandboxLost, NoCapacity."""
        try:
            return await self._examination(files, "episode", thorough=unsure, second=True)
        except Superseded:
            raise
        except (SandboxLost, NoCapacity):  # reported as judge_retry
            if first.touched:
                raise
            return None

    async def _examination(
        self, files: dict[str, bytes], isolation: Isolation, *, thorough: bool, second: bool = False
    ) -> Examination:
        """Run the hidden tests and check the machine. A candidate whose machine dies twice has crashed.

        The first death may have been a neighbour's in the group's shared machine, so the second try runs alone.
        Failures of our own parts are tried `TRIES` times and then raised: SandboxLost, NoCapacity.
        """
        deaths = failures = 0
        while True:
            number = deaths + failures + (2 * TRIES if second else 0)
            alone = isolation == "episode"
            try:
                result, written, touched = await self._run(files, isolation, number, thorough and alone)
            except _CandidateDied as error:
                deaths += 1
                await self.report("judge_vm_died", str(error), "warning", deaths=deaths, **self.where)
                if deaths == 2:
                    return Examination(crashed=True)
                isolation = "episode"
                continue
            except _NotApplied as error:
                return Examination(refused=str(error), alone=alone)
            except Superseded:
                raise
            except (SandboxLost, NoCapacity) as error:
                failures += 1
                await self.report("judge_retry", str(error), "warning", **self.where)
                if failures == TRIES:
                    raise
                await asyncio.sleep(RETRY_S * failures)
                continue
            return self._read(result, written, touched, alone)

    def _read(self, result: OpResult, written: bytes | None, touched: tuple[str, ...], alone: bool) -> Examination:
        try:
            made = examined(self.candidate.oracle, result, written, touched=touched, alone=alone)
        except RefusedOutput as error:
            made = Examination(refused=str(error), touched=touched, alone=alone)
        except Exception as error:
            raise _fault(error) from error
        log = written if self.candidate.oracle.grading.parser else None
        return msgspec.structs.replace(made, output=tail(result, log))

    async def _run(
        self, files: dict[str, bytes], isolation: Isolation, number: int, thorough: bool
    ) -> tuple[OpResult, bytes | None, tuple[str, ...]]:
        """The tests in one fresh sandbox, the log or reward file that they wrote, and what the integrity check found.
        `number` tells the tries apart."""
        trajectory = self.candidate.trajectory
        request = Acquire(
            run=trajectory.run,
            lane=trajectory.lane,
            role="judge",
            # A machine of its own must not be the group's.
            group=f"{trajectory.group}-{trajectory.slot}-alone{number}" if number else trajectory.group,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            isolation=isolation,
            seed=trajectory.seed,
            lease_s=self.options.lease_s,
        )
        task = self.candidate.task
        entries = task.entries or ()
        if not task.image:
            entries = tuple(repository_entries(task, self.candidate.oracle, trajectory, files))
        request = for_task(request, task, files, entries)
        archives: tuple[PushTar, ...] = ()
        if verifier := self.candidate.oracle.verifier:
            archives = await self._artifacts(verifier, request)
            request = msgspec.structs.replace(
                request, template=verifier.image, workdir="/", limits=verifier.limits, files={}, entries=()
            )
        try:
            sandbox = await self.machines.acquire(request)
        except FilesRefused as error:
            raise _NotApplied(str(error)) from None
        self.plugins.update(dict.fromkeys(sandbox.plugins))
        self.made_of[sandbox.backend, sandbox.machine] = None
        try:
            if verifier:
                await self._place(sandbox, archives, f"{trajectory.id}-place{number}")
            elif self.candidate.task.image:
                await self._apply(sandbox, f"{trajectory.id}-apply{number}")
            result = await self._prepared(sandbox, f"{trajectory.id}-prepare{number}")
            if result.ok:
                plan = self.candidate.oracle.tests
                result = await sandbox.call(RunTests(plan=plan), f"{trajectory.id}-judge{number}")
            written = await self._written(sandbox, f"{trajectory.id}-written{number}")
            checked = await sandbox.call(CheckIntegrity(thorough=thorough), f"{trajectory.id}-look{number}")
            if result.ended or checked.ended:
                raise _CandidateDied(result.error or checked.error)
        except (NodeSilent, Superseded):
            raise
        except SandboxLost as error:
            raise _CandidateDied(str(error)) from None
        finally:
            self.machines.give_back(sandbox)
        if not checked.ok:
            await self.report("machines_not_checked", checked.error, "warning")
        return result, written, checked.tampered

    async def _prepared(self, sandbox: Sandbox, call_id: str) -> OpResult:
        """Run the command that the tests need as root before them."""
        plan = self.candidate.oracle.tests
        if not plan.prepare:
            return OpResult()
        return await sandbox.call(Exec(argv=plan.prepare, user="0", timeout_s=plan.timeout_s), call_id)

    async def _written(self, sandbox: Sandbox, call_id: str) -> bytes | None:
        """The content of the grading's file; None where there is none."""
        path = self.candidate.oracle.grading.file
        if not path:
            return None
        read = await sandbox.call(ReadFile(path=path, limit=LARGEST), call_id)
        return read.data if read.ok else None

    async def _artifacts(self, verifier: Verifier, request: Acquire) -> tuple[PushTar, ...]:
        """The artifacts of a verifier with an image of its own, from a fresh sandbox of the task's image with the
        candidate's changes. None of the candidate's programs runs there."""
        task = self.candidate.task
        root = task.repository.strip("/")
        source = msgspec.structs.replace(
            request,
            group=f"{request.group}-artifacts",
            isolation="episode",
            workdir="/",
            files={f"{root}/{path}": content for path, content in task.files.items()},
            entries=tuple(msgspec.structs.replace(e, path=f"{root}/{e.path}") for e in task.entries or ()),
        )
        sandbox = await self.machines.acquire(source)
        try:
            await self._change(
                sandbox,
                from_root(task, image_changes(task, self.candidate.oracle, self.candidate.trajectory)),
                "artifacts",
            )
            return await artifacts.collect(sandbox, verifier.artifacts)
        except artifacts.NotCollected as error:
            raise _NotApplied(str(error)) from None
        finally:
            self.machines.give_back(sandbox)

    async def _place(self, sandbox: Sandbox, archives: Sequence[PushTar], call_id: str) -> None:
        """Put the artifacts and the hidden tests into a fresh sandbox of the verifier's image."""
        for index, archive in enumerate(archives):
            put = await sandbox.call(archive, f"{call_id}-{index}")
            if not put.ok:
                raise _NotApplied(f"an artifact cannot be put into the verifier's sandbox: {put.error}")
        await self._add_tests(sandbox, call_id)

    async def _apply(self, sandbox: Sandbox, call_id: str) -> None:
        """Make the candidate's changes in a fresh sandbox of its image, then add the hidden tests."""
        await self._change(
            sandbox, image_changes(self.candidate.task, self.candidate.oracle, self.candidate.trajectory), call_id
        )
        await self._add_tests(sandbox, call_id)

    async def _change(self, sandbox: Sandbox, changes: ApplyChanges, call_id: str) -> None:
        changed = await sandbox.call(changes, call_id)
        if not changed.ok:
            raise _NotApplied(f"the changes cannot be made in a fresh sandbox: {changed.error}")

    async def _add_tests(self, sandbox: Sandbox, call_id: str) -> None:
        oracle = self.candidate.oracle
        added = await write(
            sandbox, oracle.hidden | oracle.sealed, oracle.entries or (), f"{call_id}-tests", forced=True
        )
        if not added.ok:
            raise _NotApplied(f"the hidden tests cannot be written over the changes: {added.error}")

    async def _compare(self, first: Examination, second: Examination | None) -> Literal["", "same", "other"]:
        """Whether the second examination agrees. When the candidate changed its machine, the two are not compared."""
        if second is None or second.touched:
            return ""
        if second.ok == first.ok:
            return "same"
        direction = "passes only beside" if first.ok else "fails only beside"
        text = f"{self.candidate.trajectory.id} {direction} its group, not alone"
        await self.report("verdicts_differ", text, "error", **self.where)
        return "other"

    async def _report_touched(self, first: Examination, second: Examination | None) -> None:
        last = second or first
        changed = last.touched or first.touched
        if changed:
            did = "did it" if last.alone and last.touched else "did not do it"
            text = f"{self.candidate.trajectory.id} was judged in a machine that was touched ({', '.join(changed)})"
            await self.report("machine_touched", f"{text} and {did}", "error", **self.where)


def _fault(error: Exception) -> NoVerdict:
    """Our own code raised while it processed a candidate's data."""
    return NoVerdict("judge_fault", "".join(traceback.format_exception(error))[-4000:])
