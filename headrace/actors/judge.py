"""judge: scores every Trajectory on arrival, by hidden tests in a fresh sandbox.

The sandbox gets the task's repository, the allowed part of the diff and the hidden tests in one frame, runs them once,
and is never used again. With group isolation the diffs of a group, frozen before any test is sent, share one clone.
Some verdicts from such clones, and all suspicious ones, are made again in a clone of their own; two that differ are a
sign that one diff reached another, and the curriculum drops the group. After the tests the host looks whether the
machine was touched (`Inspect`): nothing is believed that comes out of one that was, and the diff that does it to a
machine of its own has cheated.
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
from headrace.messages.sandbox import Acquire, Inspect, Isolation, NoRoom, OpResult, RunTests, SandboxLost, TestOutcome
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
        self._blind = False
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
        found += judge_rules.behaviour(task, trajectory)
        second: _Examination | None = None
        try:
            first = await self._examine(trajectory, task, oracle, bool(found))
            suspicious = bool(found or first.touched or judge_rules.caught(oracle, first.ok))
            if trajectory.isolation == "group" and not first.crashed and (suspicious or self._drawn(trajectory)):
                second = await self._second(trajectory, task, oracle, first, suspicious)
        except Superseded as error:
            # Another judge works on it now; the delivery is its to settle.
            received.settled = True
            await self.event("superseded", str(error), "warning", trajectory=trajectory.id)
            return
        except (SandboxLost, NoRoom) as error:
            await self._fail(trajectory, str(error))
            return
        if first.touched or (second and second.touched):
            await self._tell_touched(trajectory, first, second)
        own = second or first
        if own.alone:
            found += tuple(f"machine_touched:{what}" for what in own.touched)
        # Where the diff did it there is nothing to compare.
        again: Literal["", "same", "other"] = ""
        if second and not second.touched:
            again = "same" if second.ok == first.ok else "other"
        if again == "other":
            await self.event(
                "verdicts_differ",
                f"{trajectory.id} {'passes only beside' if first.ok else 'fails only beside'} its group, not alone",
                "error",
                group=trajectory.group,
                slot=trajectory.slot,
            )
        believed = own if first.touched or own.touched else first
        if caught := judge_rules.caught(oracle, believed.ok):
            found += caught
            text = f"{trajectory.id} passes tests that nobody can pass: the process that runs them was taken"
            await self.event("canary_passed", text, "error", group=trajectory.group, slot=trajectory.slot)
        await self._publish(received.seq, trajectory, task, believed, found, again, time.monotonic() - started)

    async def _second(
        self, trajectory: Trajectory, task: Task, oracle: Oracle, first: "_Examination", suspicious: bool
    ) -> "_Examination | None":
        """What a clone of its own says; nothing where our own parts failed: then the first verdict stands, unless its
        machine was touched: SandboxLost, NoRoom."""
        try:
            return await self._examine(trajectory, task, oracle, suspicious, alone=True)
        except Superseded:
            raise
        except (SandboxLost, NoRoom):  # told as judge_retry
            if first.touched:
                raise
            return None

    async def _tell_touched(self, trajectory: Trajectory, first: "_Examination", second: "_Examination | None") -> None:
        own = second or first
        did = "did it" if own.alone and own.touched else "did not do it"
        what = ", ".join(own.touched or first.touched)
        text = f"{trajectory.id} was judged in a machine that was touched ({what}) and {did}"
        await self.event("machine_touched", text, "error", group=trajectory.group, slot=trajectory.slot)

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

    async def _examine(
        self, trajectory: Trajectory, task: Task, oracle: Oracle, suspicious: bool, alone: bool = False
    ) -> "_Examination":
        """What the hidden tests say, and whether the machine was touched; a suspicious diff's own is looked at
        thoroughly. A candidate that takes its VM down twice has crashed.

        A VM that dies under a group's diffs says nothing about this one: it is tried again alone. Failures of our own
        parts are tried `TRIES` times and then raised: SandboxLost, NoRoom.
        """
        files = judge_rules.tree(task, oracle, trajectory.diff, trajectory.deleted)
        isolation: Isolation = "episode" if alone else trajectory.isolation
        deaths = failures = 0
        while True:
            try:
                again = deaths + failures + (2 * TRIES if alone else 0)
                thorough = suspicious and isolation == "episode"
                result, touched = await self._once(trajectory, task, oracle, files, isolation, again, thorough)
                tests = settle(result.tests, oracle.answers)
                ok = judge_rules.passed(tests, oracle.expected)
                return _Examination(ok, tests, touched=touched, alone=isolation == "episode")
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
        thorough: bool,
    ) -> tuple[OpResult, tuple[str, ...]]:
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
            result = await sandbox.call(RunTests(plan=oracle.tests), f"{trajectory.id}-judge{again}")
            looked = await sandbox.call(Inspect(thorough=thorough), f"{trajectory.id}-look{again}")
            if not looked.ok and not self._blind:
                self._blind = True
                await self.event("machines_not_looked_at", looked.error, "warning")
            return result, looked.touched
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
    touched: tuple[str, ...] = ()
    """What `Inspect` found in the machine."""
    alone: bool = False
    """In a machine of its own."""


class _CandidateDied(Exception):
    """The VM went down while the candidate's code ran in it."""
