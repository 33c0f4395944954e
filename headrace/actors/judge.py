"""The judge: publishes one Score for every Trajectory, by hidden tests in new sandboxes.

The examination itself is `judging.examination.examine`. This actor gives it the trajectory and the sandboxes, computes
the reward, publishes the Score, and ends a group's shared machine once the group is closed or dropped. Content that
has a verdict already is not examined again (judging/reuse.py).

A trajectory gets a SlotFailed instead of a Score only when infrastructure failed: a sandbox in which no candidate's
code ran, or the rubric's model endpoint.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from headrace.algorithms.rewards import REWARDS
from headrace.bus.errors import Reject, Unrecoverable
from headrace.bus.nats.received import Received
from headrace.bus.nats.records import UNREADABLE
from headrace.bus.runtime import ack_waits
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.judging import checkers, reuse, rules
from headrace.judging.candidates import Candidate
from headrace.judging.examination import Options, examine
from headrace.judging.rubrics.client import EndpointFailed, EndpointRefused
from headrace.judging.rubrics.judge import RubricError, RubricJudge
from headrace.judging.scoring import Rewarder, score_of
from headrace.judging.verdicts import NoVerdict, Verdict
from headrace.ledger.seeds import seed_of
from headrace.ledger.training import suites_during
from headrace.messages.base import Message
from headrace.messages.judging import Certificate, Score
from headrace.messages.ledger import GroupClosed, GroupDropped
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import SlotFailed, Trajectory
from headrace.messages.sandbox import GroupKey, NoCapacity, SandboxLost
from headrace.messages.subjects import CLOSE, EVENT, FAIL, SCORE, TRAJ
from headrace.messages.tasks import Oracle, SandboxLimits, Task, TaskRef
from headrace.registry import PluginError
from headrace.sandboxes.client import Sandboxes, Superseded
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.certificates import AtIssue, task_hash
from headrace.tasks.suites import suite_plugins

_ONCE = frozenset({"machines_not_checked", "rubric_not_judged"})
FAULTS_IN_A_ROW = 3
"""Attempts in a row without a verdict, through faults of the judge, a checker or the reward, that end the run."""
"""Events about the node and not about a candidate, which are published once."""


class Earlier(NamedTuple):
    """A verdict that was known before the attempt, and where it is from."""

    verdict: Verdict
    same_as: int = 0
    """Sequence of the Score of an examination of its content."""
    certificate: str = ""
    """Task hash of the certificate of the untouched repository."""


class Judge(Actor):
    """Consumes Trajectories of the train and eval lanes, publishes one Score each."""

    role: ClassVar[str] = "judge"

    async def start(self) -> None:
        """Consume trajectories and follow the ends of groups. A user's own repository has no hidden tests, so the
        trajectories of the production lane, whose group names have two subject tokens, are not consumed."""
        self._sandboxes = Sandboxes(self.bus, self.config.environment.lease_s, self.waiting)
        self._rewarder, self._rubrics = Rewarder.of(self.config), await asyncio.to_thread(RubricJudge.of, self.config)
        judge = (self._rubrics.plugin,) if self._rubrics is not None else ()
        await agree(self.bus, self.run, (*self._rewarder.plugins, *self._suite_plugins(), *judge))
        suite = lru_cache(64)(partial(open_suite, root=self.config.tasks.dir))
        # A small cache is enough, because the slots of a group arrive one after another.
        self._sides = lru_cache(64)(lambda ref: (suite(ref.suite).task(ref.task), suite(ref.suite).oracle(ref.task)))
        self._reported: set[str] = set()
        self._news = asyncio.Event()
        self._scored = self._reused = self._faults = 0
        self._passed = 0
        self.every(self.config.environment.lease_s / 3, self._sandboxes.renew, "lease renewal")
        self.every(2.0, self._measure, "metrics")
        self._at_issue = lru_cache(64)(lambda name: AtIssue(suite(name), self.config.tasks.dir))
        self._known, self._steady = reuse.Known(self.run), lru_cache(4096)(self._certified)
        self._limits = SandboxLimits(**msgspec.structs.asdict(self.config.sandboxes))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The lock of each content that is being judged: equal attempts wait for the first one's verdict."""
        self._live = False
        scores = SCORE.where(run=self.run, judge=rules.VERSION)
        rejudged = SCORE.where(run=f"{self.run}-{rules.VERSION}", judge=rules.VERSION)
        certificates = EVENT.where(run=self.run, actor="certifier", type=Certificate.type_name)
        self._made: dict[str, Certificate] = {}
        await self.recover_and_follow(
            {"HR_SCORE": (scores, rejudged), "HR_EVENT": (certificates,)}, self._learn, self._news
        )
        self._live = True
        self.spawn(self._release_groups(await self.bus.last_seq("HR_SCORE") + 1), "ends of groups")
        await self.consume(
            TRAJ,
            self._handle,
            durable=f"judge-{self.run}",
            filter=TRAJ.at(run=self.run, group="any").removesuffix("any") + "*",
            credit=self.config.judge.credit,
            ack_wait=ack_waits.WORK_S,
        )

    async def stop(self) -> None:
        """Release the sandboxes that are still held."""
        await self._sandboxes.close()
        if self._rubrics is not None:
            await self._rubrics.close()

    def _suite_plugins(self) -> tuple[Plugin, ...]:
        tasks = self.config.tasks
        return suite_plugins((tasks.suite, tasks.heldout, tasks.unseen, *suites_during(self.config)))

    async def _measure(self) -> None:
        await self.metric(scored=self._scored, reused=self._reused, passed=self._passed, sandboxes=len(self._sandboxes))

    def _learn(self, received: Received[Message]) -> bool:
        """Note a Score's content, or a certificate of this run."""
        match received.message:
            case Certificate() as made:
                self._made[made.task_hash] = made
            case Score() as score:
                self._note(received.seq, score)
        return False

    def _note(self, seq: int, score: Score) -> None:
        if self._known.note(seq, score) and self._live:
            text = f"two examinations of one content of {score.task.task} differ: its verdict counts no more"
            data = {"content": score.content, "group": score.group, "slot": score.slot, "score_seq": seq}
            self.spawn(self.event("verdicts_differ", text, "error", **data), "an event")

    def _content(self, candidate: Candidate) -> str:
        """The content's name; empty where no verdict may count again: no certificate shows that the task's known
        solution passes every time."""
        try:
            content = reuse.content_of(candidate, self._limits)
        except Exception:  # the examination reports what our own code cannot process
            return ""
        return content if content and self._steady(candidate.trajectory.task) else ""

    def _certified(self, ref: TaskRef) -> Certificate | None:
        """The certificate of a task that may be trained on."""
        made: Certificate | str | None = self._made.get(task_hash(*self._sides(ref)))
        try:
            made = made or self._at_issue(ref.suite).of(ref.task)
        except ValueError:  # a damaged file certifies nothing; the curriculum refuses it at the start
            return None
        return made if isinstance(made, Certificate) and made.verdict == "certified" else None

    async def _recorded(self, content: str, candidate: Candidate) -> Earlier | None:
        """The verdict on a content; None where it is to be examined."""
        if self._known.barred(content):
            return None
        seq, untouched = self._known.find(content), self._untouched(candidate)
        if not seq:
            return untouched
        try:
            score = (await self.bus.get("HR_SCORE", seq)).message
        except UNREADABLE:  # the trainer purged it
            self._known.forget(content)
            return None
        verdict = reuse.from_record(score, candidate)
        if verdict is None:
            self._known.bar(content)
            return None
        if untouched is not None and verdict.decision != untouched.verdict.decision:
            self._known.bar(content)
            text = f"{candidate.task.ref.task} is {verdict.decision} untouched, which its certificate denies"
            await self.event("verdicts_differ", text, "error", content=content, score_seq=seq)
            return None
        return Earlier(verdict, same_as=seq)

    def _untouched(self, candidate: Candidate) -> Earlier | None:
        """The verdict of the task's certificate. A reward from outside may read the tests, of which it has none."""
        certificate = self._steady(candidate.trajectory.task)
        if certificate is None or not REWARDS.builtin(self._rewarder.name):
            return None
        verdict = reuse.by_certificate(candidate, certificate)
        return Earlier(verdict, certificate=certificate.task_hash) if verdict is not None else None

    def _checked(self, trajectory: Trajectory) -> bool:
        """Whether this trajectory is examined although its content has a verdict; every judge draws the same ones."""
        return seed_of(self.config.run.seed, "check a verdict", trajectory.id) < reuse.CHECKED * 2**62

    async def _release_groups(self, start: int) -> None:
        """End a group's shared machine once the group is closed or dropped, instead of after the idle time. Every judge
        follows the closings, because each knows only the groups that it acquired itself."""
        async for received in self.bus.follow("HR_SCORE", CLOSE.where(run=self.run), start=start):
            ended = received.message
            if isinstance(ended, GroupClosed | GroupDropped):
                await self._sandboxes.release_group(GroupKey(self.run, "train", "judge", ended.group))

    async def _handle(self, received: Received[Trajectory]) -> None:
        trajectory = received.message
        if received.deliveries > 1 and await self._is_scored(trajectory, received.seq):
            return
        task, oracle = self._task_of(trajectory)
        if trajectory.lane == "train" and oracle.grading.trust == "log" and not self.config.tasks.at_risk:
            text = f"task {task.ref.task} of {task.ref.suite} is judged by a log, which a policy in training can forge"
            self.fail(Unrecoverable(f"{text}; set [tasks] at_risk = true to train on it nevertheless"))
            raise Reject(text)
        candidate = Candidate(trajectory=trajectory, task=task, oracle=oracle)
        async with AsyncExitStack() as turn:
            content, earlier, alone = self._content(candidate), None, False
            if content:
                await turn.enter_async_context(self._turns.setdefault(content, asyncio.Lock()))
                earlier = await self._recorded(content, candidate)
                if earlier is not None and self._checked(trajectory):
                    earlier, alone = None, True
                if earlier is not None or alone or self._known.barred(content):
                    await turn.aclose()
            await self._score(received, candidate, content, earlier, alone)
            if content and not self._known.find(content) and not (earlier is not None and earlier.certificate):
                self._known.bar(content)  # no verdict counts: those that wait are examined at once

    async def _score(
        self,
        received: Received[Trajectory],
        candidate: Candidate,
        content: str,
        earlier: Earlier | None,
        alone: bool,
    ) -> None:
        """Publish the Score of a candidate, or say why it has none.

        earlier: the verdict on its content; None to examine it. alone: in a machine of its own, whatever the run says.
        """
        trajectory, oracle = candidate.trajectory, candidate.oracle
        options = Options(again=self._drawn(trajectory), lease_s=self.config.environment.lease_s)
        started = time.monotonic()
        try:
            checkers.used(oracle)
            if earlier is None:
                examined = candidate
                if alone:
                    apart = msgspec.structs.replace(trajectory, isolation="episode")
                    examined = msgspec.structs.replace(candidate, trajectory=apart)
                verdict = await examine(examined, self._sandboxes, self._examination_event, options)
                content = content if reuse.comparable(candidate, verdict) else ""
            else:
                verdict, content = earlier.verdict, "" if earlier.certificate else content
        except NoVerdict as error:
            await self._leave_out(trajectory, error)
            return
        except PluginError as error:
            self.fail(error)
            raise
        except Superseded as error:
            # Another judge examines this trajectory now and acknowledges its message.
            received.settled = True
            await self.event("superseded", str(error), "warning", trajectory=trajectory.id)
            return
        except (SandboxLost, NoCapacity) as error:
            await self._fail(trajectory, str(error))
            return
        try:
            verdict = await self._with_rubric(candidate, verdict)
        except EndpointFailed as error:
            await self._fail(trajectory, str(error), "judge_endpoint")
            return
        except (RubricError, EndpointRefused) as error:
            self.fail(error)
            raise
        try:
            reward = await self._rewarder.reward(trajectory, verdict)
        except NoVerdict as error:
            await self._leave_out(trajectory, error)
            return
        self._faults = 0
        score = score_of(
            candidate,
            received.seq,
            verdict,
            reward,
            by=self._rewarder,
            wall_s=time.monotonic() - started,
            content=content,
            same_as=earlier.same_as if earlier is not None else 0,
            certificate=earlier.certificate if earlier is not None else "",
        )
        await self._publish(score)

    async def _with_rubric(self, candidate: Candidate, verdict: Verdict) -> Verdict:
        """The verdict with the rubric judge's result, if the task has a rubric and the verdict has no reason."""
        if verdict.reason:
            return verdict
        if self._rubrics is None:
            if candidate.oracle.rubric:
                text = f"tasks of {candidate.task.ref.suite} have rubrics, and [judge] model_url names no model"
                await self._examination_event("rubric_not_judged", text, "warning")
            return verdict
        return msgspec.structs.replace(verdict, rubric=await self._rubrics.judge(candidate))

    async def _examination_event(
        self, kind: str, text: str = "", level: Literal["info", "warning", "error"] = "info", /, **data: Any
    ) -> None:
        if kind in _ONCE and kind in self._reported:
            return
        self._reported.add(kind)
        await self.event(kind, text, level, **data)

    def _drawn(self, trajectory: Trajectory) -> bool:
        """Whether this trajectory is examined twice; the choice is derived from its id, so every judge makes the same
        one."""
        seed = seed_of(self.config.run.seed, "judge again", trajectory.id)
        return seed < self.config.judge.again * 2**62

    def _task_of(self, trajectory: Trajectory) -> tuple[Task, Oracle]:
        """The task and its oracle. Reject if the task does not exist."""
        try:
            return self._sides(trajectory.task)
        except UnknownSuite as error:
            raise Reject(f"unknown task: {error}") from None

    async def _publish(self, score: Score) -> None:
        seq = await self.bus.publish(
            SCORE.at(run=score.run, judge=rules.VERSION, group=score.group),
            score,
            msg_id=f"{score.run}.{score.trajectory_seq}.{rules.VERSION}",
        )
        self._note(seq, score)  # equal attempts wait for it
        self._scored += 1
        self._reused += bool(score.same_as or score.certificate)
        self._passed += score.passed

    async def _is_scored(self, trajectory: Trajectory, seq: int) -> bool:
        subject = SCORE.at(run=trajectory.run, judge=rules.VERSION, group=trajectory.group)
        async for received in self.bus.history("HR_SCORE", subject):
            score = received.message
            if isinstance(score, Score) and score.trajectory_seq == seq:
                return True
        return False

    async def _leave_out(self, trajectory: Trajectory, error: NoVerdict) -> None:
        """End the slot without a verdict. `FAULTS_IN_A_ROW` faults of our own code end the run, with the traceback."""
        if error.reason != "no_verdict":
            self._faults += 1
        if self._faults == FAULTS_IN_A_ROW:
            text = f"{FAULTS_IN_A_ROW} times in a row an attempt got no verdict: {error.reason}: {error}"
            self.fail(Unrecoverable(text))
            raise error
        await self._fail(trajectory, str(error), error.reason)

    async def _fail(self, trajectory: Trajectory, detail: str, reason: str = "judge_lost") -> None:
        failed = SlotFailed(
            run=trajectory.run,
            lane=trajectory.lane,
            group=trajectory.group,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            reason=reason,
            detail=detail,
        )
        await self.bus.publish(
            FAIL.at(run=trajectory.run, group=trajectory.group),
            failed,
            msg_id=f"{trajectory.run}.{trajectory.id}.{reason}",
        )
        await self.event(reason, detail, "error", group=trajectory.group, slot=trajectory.slot)
