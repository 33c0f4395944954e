"""judge: scores every Trajectory on arrival, by hidden tests in a fresh sandbox.

The sandbox gets the task's repository, the allowed part of the diff and the hidden tests in one frame, runs them once,
and is never used again. With group isolation the diffs of a group, frozen before any test is sent, share one clone.
Some verdicts from such clones, and all suspicious ones, are made again in a clone of their own; two that differ are a
sign that one diff reached another, and the curriculum drops the group.
"""

import asyncio
import time
from functools import lru_cache, partial
from typing import ClassVar, Literal, NamedTuple

from headrace.actors import judge_rules
from headrace.actors.sandbox_client import NodeSilent, Sandboxes, Superseded
from headrace.algorithms.rewards import shaped_reward
from headrace.bus.actor import Actor
from headrace.bus.errors import Reject
from headrace.bus.received import Received
from headrace.messages.judging import Score
from headrace.messages.rollout import SlotFailed, Trajectory
from headrace.messages.sandbox import Acquire, Isolation, NoRoom, OpResult, RunTests, SandboxLost, TestOutcome
from headrace.messages.subjects import FAIL, SCORE, TRAJ
from headrace.messages.tasks import Oracle, Task
from headrace.replay.seeds import seed_of
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.sealing import settle

TRIES = 3
"""Sandboxes that our own parts may fail for one Trajectory before it is given up."""


class Judge(Actor):
    """Consumes Trajectories of the train and eval lanes, publishes one Score each."""

    role: ClassVar[str] = "judge"

    async def start(self) -> None:
        """Pull. A user's own repository has no hidden tests: the production lane's two-token groups are not read."""
        self._sandboxes = Sandboxes(self.bus, self.config.environment.lease_s, self.waiting)
        suite = lru_cache(64)(partial(open_suite, root=self.config.tasks.dir))
        # The slots of a group ask one after another.
        self._sides = lru_cache(64)(lambda ref: (suite(ref.suite).task(ref.task), suite(ref.suite).oracle(ref.task)))
        self._scored = 0
        self._passed = 0
        self.every(self.config.environment.lease_s / 3, self._sandboxes.renew, "lease renewal")
        self.every(2.0, self._measure, "metrics")
        await self.consume(
            TRAJ,
            self._handle,
            durable=f"judge-{self.run}",
            filter=TRAJ.at(run=self.run, group="any").removesuffix("any") + "*",
            credit=self.config.judge.credit,
        )

    async def stop(self) -> None:
        """Give back what is held."""
        await self._sandboxes.close()

    async def _measure(self) -> None:
        await self.metric(scored=self._scored, passed=self._passed, sandboxes=len(self._sandboxes))

    async def _handle(self, received: Received[Trajectory]) -> None:
        trajectory = received.message
        if received.deliveries > 1 and await self._is_scored(trajectory, received.seq):
            return
        task, oracle = self._task_of(trajectory)
        started = time.monotonic()
        found = judge_rules.suspicions(task, oracle, trajectory.diff, trajectory.touched)
        again: Literal["", "same", "other"] = ""
        try:
            first = await self._examine(trajectory, task, oracle)
            if trajectory.isolation == "group" and not first.crashed and (found or self._drawn(trajectory)):
                again = await self._second(trajectory, task, oracle, first)
        except Superseded as error:
            # Another judge works on it now; the delivery is its to settle.
            received.settled = True
            await self.event("superseded", str(error), "warning", trajectory=trajectory.id)
            return
        except (SandboxLost, NoRoom) as error:
            await self._fail(trajectory, str(error))
            return
        if again == "other":
            await self.event(
                "verdicts_differ",
                f"{trajectory.id} {'passes only beside' if first.ok else 'fails only beside'} its group, not alone",
                "error",
                group=trajectory.group,
                slot=trajectory.slot,
            )
        await self._publish(received.seq, trajectory, task, first, found, again, time.monotonic() - started)

    async def _second(
        self, trajectory: Trajectory, task: Task, oracle: Oracle, first: "_Examination"
    ) -> Literal["", "same", "other"]:
        """What a clone of its own says; nothing where our own parts failed: then the first verdict stands."""
        try:
            second = await self._examine(trajectory, task, oracle, alone=True)
        except Superseded:
            raise
        except (SandboxLost, NoRoom):  # told as judge_retry
            return ""
        return "same" if second.ok == first.ok else "other"

    def _drawn(self, trajectory: Trajectory) -> bool:
        """Whether this verdict is among those that are made twice; the same whoever judges."""
        seed = seed_of(self.config.run.seed, "judge again", trajectory.id)
        return seed < self.config.judge.again * 2**62

    def _task_of(self, trajectory: Trajectory) -> tuple[Task, Oracle]:
        """Both sides of the task. Reject when there is none."""
        try:
            return self._sides(trajectory.task)
        except UnknownSuite as error:
            raise Reject(f"unknown task: {error}") from None

    async def _examine(self, trajectory: Trajectory, task: Task, oracle: Oracle, alone: bool = False) -> "_Examination":
        """What the hidden tests say. A candidate that takes its VM down twice has crashed.

        A VM that dies under a group's diffs says nothing about this one: it is tried again alone. Failures of our own
        parts are tried `TRIES` times and then raised: SandboxLost, NoRoom.
        """
        files = judge_rules.tree(task, oracle, trajectory.diff, trajectory.deleted)
        isolation: Isolation = "episode" if alone else trajectory.isolation
        deaths = failures = 0
        while True:
            try:
                again = deaths + failures + (2 * TRIES if alone else 0)
                result = await self._once(trajectory, task, oracle, files, isolation, again)
                tests = settle(result.tests, oracle.answers)
                return _Examination(judge_rules.passed(tests, oracle.expected), tests)
            except _CandidateDied as error:
                deaths += 1
                await self.event(
                    "judge_vm_died", str(error), "warning", group=trajectory.group, slot=trajectory.slot, deaths=deaths
                )
                if deaths == 2:
                    return _Examination(False, (), crashed=True)
                isolation = "episode"
            except Superseded:
                raise
            except (SandboxLost, NoRoom) as error:
                failures += 1
                await self.event("judge_retry", str(error), "warning", group=trajectory.group, slot=trajectory.slot)
                if failures == TRIES:
                    raise
                await asyncio.sleep(0.5 * failures)

    async def _once(
        self,
        trajectory: Trajectory,
        task: Task,
        oracle: Oracle,
        files: dict[str, bytes],
        isolation: Isolation,
        again: int,
    ) -> OpResult:
        sandbox = await self._sandboxes.acquire(
            Acquire(
                run=trajectory.run,
                lane=trajectory.lane,
                role="judge",
                # Alone means alone: it must not share its group's clone.
                group=f"{trajectory.group}-{trajectory.slot}-alone{again}" if again else trajectory.group,
                slot=trajectory.slot,
                attempt=trajectory.attempt,
                isolation=isolation,
                template=task.template,
                seed=trajectory.seed,
                lease_s=self.config.environment.lease_s,
                files=files,
            )
        )
        try:
            return await sandbox.call(RunTests(plan=oracle.tests), f"{trajectory.id}-judge{again}")
        except (NodeSilent, Superseded):
            raise
        except SandboxLost as error:
            raise _CandidateDied(str(error)) from None
        finally:
            self._sandboxes.give_back(sandbox)

    async def _publish(
        self,
        seq: int,
        trajectory: Trajectory,
        task: Task,
        examination: "_Examination",
        found: tuple[str, ...],
        again: Literal["", "same", "other"],
        seconds: float,
    ) -> None:
        rules = self.config.algorithm
        verdict: judge_rules.Verdict = (
            "candidate_crash" if examination.crashed else judge_rules.verdict(examination.ok, found)
        )
        tokens = sum(len(turn.ids) for turn in trajectory.turns)
        calls = sum(len(turn.calls) for turn in trajectory.turns)
        score = Score(
            run=trajectory.run,
            lane=trajectory.lane,
            group=trajectory.group,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            trajectory_seq=seq,
            task=trajectory.task,
            family=task.family,
            judge_version=judge_rules.VERSION,
            verdict=verdict,
            reward=shaped_reward(
                verdict == "passed",
                tokens=tokens,
                calls=calls,
                turns=len(trajectory.turns),
                weight=rules.length_penalty,
                k=rules.length_k,
                q=rules.length_q,
            ),
            passed=verdict == "passed",
            tests=examination.tests,
            suspicions=found,
            again=again,
            oldest_version=trajectory.oldest_version,
            sampled_tokens=tokens,
            turns=len(trajectory.turns),
            calls=calls,
            wall_ms=round(1000.0 * seconds, 3),
        )
        await self.bus.publish(
            SCORE.at(run=trajectory.run, judge=judge_rules.VERSION, group=trajectory.group),
            score,
            msg_id=f"{trajectory.run}.{seq}.{judge_rules.VERSION}",
        )
        self._scored += 1
        self._passed += score.passed

    async def _is_scored(self, trajectory: Trajectory, seq: int) -> bool:
        subject = SCORE.at(run=trajectory.run, judge=judge_rules.VERSION, group=trajectory.group)
        async for received in self.bus.history("HR_SCORE", subject):
            if isinstance(received.message, Score) and received.message.trajectory_seq == seq:
                return True
        return False

    async def _fail(self, trajectory: Trajectory, detail: str) -> None:
        failed = SlotFailed(
            run=trajectory.run,
            lane=trajectory.lane,
            group=trajectory.group,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            reason="judge_lost",
            detail=detail,
        )
        await self.bus.publish(
            FAIL.at(run=trajectory.run, group=trajectory.group),
            failed,
            msg_id=f"{trajectory.run}.{trajectory.id}.judge_lost",
        )
        await self.event("judge_lost", detail, "error", group=trajectory.group, slot=trajectory.slot)


class _Examination(NamedTuple):
    """One run of the hidden tests."""

    ok: bool
    tests: tuple[TestOutcome, ...]
    crashed: bool = False


class _CandidateDied(Exception):
    """The VM went down while the candidate's code ran in it."""
