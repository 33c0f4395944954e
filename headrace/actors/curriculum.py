"""The curriculum: issues groups while there is credit, closes or drops them, and requests evaluations.

Its state is a fold over the streams (`ledger.state`), and its decisions follow from that state (`ledger.schedule`). So
it saves nothing: after a crash it reads the streams again and continues.

The broker refuses the writes of a stale curriculum, one that was paused while a successor took over. Every curriculum
writes a fence into the ledger when it starts, and a SlotIssued must name the newest fence (`ledger.issuer`). A closing
must name the sequence of the run's last closing, and a new curriculum writes a fence among the closings too.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headrace.algorithms.staleness import batch_of, first_batch_of
from headrace.bus.errors import BusError, Unrecoverable
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.bus.runtime.presence import LOOK_S, Absences
from headrace.ledger import lost_attempts, training
from headrace.ledger.issuer import Issuer
from headrace.ledger.losses import Losses
from headrace.ledger.requests import training_settings
from headrace.ledger.schedule import Decision, IssueGroup, RetrySlot, Rules, awaited, bounds_of, decide, finished
from headrace.ledger.state import RunState
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.judging import Certificate, CertifyAsked
from headrace.messages.ledger import (
    LARGEST_BOUND,
    Admission,
    BoundAsked,
    GroupClosed,
    GroupDropped,
    SlotIssued,
    StalenessBound,
    admission_key,
)
from headrace.messages.operations import LAST_PHASE, LEARNING, DeadLetter
from headrace.messages.product import CLIENT_SUITE, ClientGroup
from headrace.messages.subjects import CLOSE, DLQ, EVENT, FAIL, LEDGER, SCORE, STEP
from headrace.messages.tasks import TaskRef
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from headrace.tasks import certificates, open_suite
from headrace.tasks.overlap import overlap
from headrace.tasks.suites import suite_plugins
from headrace.weights.receiving import readiness

FENCE = "curriculum"
"""Takes the place of a group in the subjects of fences."""

BOUND = "bound"
"""Takes the place of a group in the subjects of staleness bounds."""

LAGGARD_S = 30.0
"""Seconds after which a replica that serves a version below `min_version` causes an event."""

FOLLOWED = (EvalRequest, EvalResult, BoundAsked, Certificate, ClientGroup, WeightsStaged, WeightsSwapped)


class Curriculum(Actor):
    """StepDone, StepFailed, Score, SlotFailed, DeadLetter in; SlotIssued, RolloutRequest, closings, EvalRequest out."""

    role: ClassVar[str] = "curriculum"

    async def start(self) -> None:
        """Write the fences by which the broker refuses earlier curricula, read the streams, then follow them and act.
        Unrecoverable for a suite that may not be trained on."""
        self.rules = Rules.of(self.config.curriculum)
        section = self.config.tasks
        suite = open_suite(section.suite, section.dir)
        shared = await asyncio.to_thread(overlap, suite, training.evaluated(self.config), section.dir)
        if refused := certificates.forgeable(suite, section.at_risk) or shared.refused:
            raise Unrecoverable(refused)
        await agree(self.bus, self.run, suite_plugins((section.suite,)))
        allowed = section.uncertified, section.at_risk
        refused = await asyncio.to_thread(certificates.refusal, suite, section.dir, *allowed)
        if refused and not section.certify:
            raise Unrecoverable(refused)
        self._suite = suite
        self._wanted = await asyncio.to_thread(certificates.wanting, suite, section.dir) if refused else {}
        """Task hash to (suite, task id) for the tasks that the certifier must examine before the run."""
        self._made: dict[str, Certificate] = {}
        """Task hash to the certifier's Certificate."""
        self._certified: certificates.AtIssue | None = None
        self._offers: dict[str, ClientGroup] | None = {} if section.suite == CLIENT_SUITE else None
        """By name, in the order in which they came; None where the tasks are a suite's."""
        if self._offers is None:
            self.tasks = training.TaskOrder(suite.ids(), self.config.run.seed, shared.equal)
        if shared.equal:
            await self.event(
                "tasks_left_out", f"tasks of {suite.name} are evaluated", "warning", tasks=len(shared.equal)
            )
        self.state = RunState(self.run)
        self._issuer = Issuer(self.bus, self.state, training_settings(self.config).request)
        self._reported_problems = 0
        self._admission: Admission | None = None
        self._news = asyncio.Event()
        self._evaluations: dict[str, bool] = {}
        """Id of every requested evaluation to whether its result has arrived."""
        self._asked: tuple[int, BoundAsked] | None = None
        """(sequence, record) of the newest BoundAsked."""
        self._served = -1
        """The newest version that any node has staged or serves."""
        self._losses = Losses()
        self._ledger, self._laggards = readiness.ReadinessLedger(), readiness.Laggards(LAGGARD_S)
        await self._take_over()
        live = {
            "HR_LEDGER": (LEDGER.where(run=self.run), FAIL.where(run=self.run)),
            "HR_SCORE": (SCORE.where(run=self.run), CLOSE.where(run=self.run)),
            "HR_STEP": (STEP.at(run=self.run),),
            "HR_DLQ": (DLQ.where(stream="*"),),
            "HR_EVENT": tuple(EVENT.where(run=self.run, actor="*", type=kind.type_name) for kind in FOLLOWED),
        }
        written_here = (LEDGER.where(run=self.run), CLOSE.where(run=self.run))
        await self.recover_and_follow(live, self._apply, self._news, written_here)
        self.state.close_seq = max(self.state.close_seq, self._close_fence)
        await self._report_problems()
        self.spawn(self.until_superseded(self._run), "issuing")
        self.every(2.0, self._measure, "metrics")
        self._absences = Absences(self.bus, self.run)
        wait_s = self.config.rollout.wait_s
        self.every(min(LOOK_S, wait_s / 4), self._end_without_actors, "live actors of the run")

    async def _end_without_actors(self) -> None:
        """Unrecoverable once the run has waited `[rollout] wait_s` without a live actor of a role that it needs now."""
        wait_s = self.config.rollout.wait_s
        for role in self._needed():
            if await self._absences.seconds(role) >= wait_s:
                raise Unrecoverable(
                    f"no {role} of run {self.run} was alive for {wait_s:g} s ([rollout] wait_s): start one with "
                    f"`headrace actor {role} --config TOML --run {self.run}`, then the curriculum; nothing is lost"
                )

    def _needed(self) -> Iterator[str]:
        """The roles that the run needs now. A rollout actor is not among them: without one, requests become dead
        letters."""
        if self._wanted.keys() - self._made.keys():
            yield "certifier"
            return
        yield from ("judge" if self._offers is None else "feedback", "dead_letter")
        if self.state.steps < self.rules.steps:
            yield "trainer"
        if not all(self._evaluations.values()):
            yield "evaluator"

    async def _take_over(self) -> None:
        """Write both fences: the broker then refuses earlier curricula, so the streams do not change while they are
        read."""
        fence = await self._issuer.fence(FENCE, self.name(), self.id)
        self._close_fence = await self.bus.publish(CLOSE.at(run=self.run, group=FENCE), fence)

    def _apply(self, received: Received[Any]) -> bool:
        """Apply a record; True when the state changed."""
        message = received.message
        if getattr(message, "lane", "train") != "train":
            return False
        match message:
            case DeadLetter():
                lost = lost_attempts.lost_attempt(message)
                if lost is None or lost.run != self.run:
                    return False
                return self.state.fail(lost.group, lost.slot, lost.attempt, lost_attempts.REASON)
            case EvalRequest():
                self._evaluations.setdefault(message.id, False)
                return True
            case EvalResult():
                self._evaluations[message.id] = True
                return True
            case BoundAsked():
                self._asked = (received.seq, message)
                return True
            case ClientGroup():
                return self._offers is not None and self._offers.setdefault(message.group, message) is message
            case Certificate():
                self._made[message.task_hash] = message
                return True
            case WeightsStaged() | WeightsSwapped():
                self._served = max(self._served, message.version)
                self._ledger.hear(message, received.time)
                return True
        return self.state.apply(message, received.seq)

    async def _run(self) -> None:
        """The whole run, from version 0 to its last evaluation."""
        await self._certify()
        if not self.state.groups:
            await self._first_version()
        if self.config.evaluation.before:
            await self._ask(training.evaluations(self.config, self.run, "before", 0))
        await self.event("phase", LEARNING, steps=self.state.steps)
        open_slots = [slot for group in self.state.open.values() for slot in group.slots.values()]
        await self._issuer.request([slot.last.issued for slot in open_slots])
        while True:
            await self._set_bound()
            await self._measure_served()
            await self._decide()
            await self._report_problems()
            if finished(self.state, self.rules):
                break
            await self._wait()
        await self.event("phase", LAST_PHASE)
        if self.config.evaluation.after:
            await self._ask(training.evaluations(self.config, self.run, "after", self.state.steps))
        while self._served < self.state.steps:  # wait, because the end of the run also ends the weight sender
            await self._wait()
        await self._measure_served()
        while not all(self._evaluations.get(id) for id in self._own_evaluations()):
            await self._wait()
        self.status = "finished"
        await self.event("run_finished", f"{self.state.steps} steps", steps=self.state.steps, groups=self.state.issued)

    async def _decide(self) -> None:
        """Carry out decisions until there are none.

        Equal decisions twice in a row mean that the ledger holds contradictory records. Then this publishes an event
        and returns, because it would write the same records without end."""
        before: Sequence[Decision] = ()
        while decisions := decide(self.state, self.rules, self._offered()):
            if decisions == before:
                text = f"{decisions[0]} changed nothing: the ledger of {self.run} holds forged or contradictory records"
                await self.event("no_progress", text, "error")
                return
            await self._carry_out(decisions)
            before = decisions

    def _offered(self) -> list[str] | None:
        """Clients' groups that are not issued; None where the tasks are a suite's."""
        return None if self._offers is None else [name for name in self._offers if name not in self.state.groups]

    async def _wait(self) -> None:
        open_, steps = len(self.state.open), self.state.steps
        self.status = f"step {steps} of {self.rules.steps}, {open_} groups open"
        await self.news(self._news, lambda: awaited(self.state, self.rules))

    async def _set_bound(self) -> None:
        """Write a StalenessBound among the closings: the configured one first, then each that an operator requests."""
        state, section = self.state, self.config.curriculum
        per_step = section.groups_per_step
        if state.bounds is None:
            first = batch_of(len(state.closings) + per_step - 1, per_step)
            await self._close(StalenessBound(run=self.run, bound=section.staleness, first_batch=first))
        answered = max((record.asked_seq for record, _ in state.bound_records), default=0)
        if self._asked is None or self._asked[0] <= answered:
            return
        seq, asked = self._asked
        bounds = bounds_of(state, self.rules)
        if not 0 <= asked.bound <= LARGEST_BOUND:
            text = f"expected a staleness bound from 0 to {LARGEST_BOUND}, got {asked.bound}"
            await self.event("bound_refused", text, "warning")
            self._asked = None
            return
        first = first_batch_of(
            bounds, asked.bound, len(state.closings), state.index, per_step, drop=section.on_stale == "drop"
        )
        await self._close(StalenessBound(run=self.run, bound=asked.bound, first_batch=first, asked_seq=seq))
        text = f"staleness bound {asked.bound} from batch {first} on"
        await self.event("bound_changed", text, bound=asked.bound, first_batch=first)

    async def _first_version(self) -> None:
        """Wait until an engine serves a version."""
        self.status = "waiting for version 0"
        with self.waiting("an engine that serves version 0"):
            async for _ in self.bus.follow("HR_EVENT", EVENT.where(run=self.run, actor="*", type="weights_swapped")):
                return

    async def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Write decisions to the streams and apply them to the state."""
        for decision in decisions:
            match decision:
                case IssueGroup():
                    group = self.state.groups.get(decision.group)
                    if group is not None:
                        task = group.first.task
                    elif self._offers is not None:
                        task = self._offers[decision.group].task
                    else:
                        task = training.task(self.config, self.tasks, decision.number)
                    if group is None:  # a known group was examined before its first slot was issued
                        await self._examined(task)
                    await self._issue(training.slots_of(self.config, self.run, decision, task, decision.index))
                case RetrySlot():
                    first = self.state.groups[decision.group].first
                    await self._issue(training.slots_of(self.config, self.run, decision, first.task, first.index))
                    await self.event(
                        "slot_reissued",
                        f"{decision.group} slot {decision.slot}: {decision.reason}",
                        "warning",
                        attempt=decision.attempt,
                        reason=decision.reason,
                    )
                case GroupClosed():
                    await self._close(decision)
                    self._losses.count(decision, self.state)
                case GroupDropped():
                    await self._close(decision)
                    text = f"{decision.group}: {decision.reason}: {decision.detail}"
                    await self.event("group_dropped", text, "warning", reason=decision.reason)
                    if reason := self._losses.count(decision, self.state):
                        raise Unrecoverable(reason)

    async def _certify(self) -> None:
        """Wait for missing certificates and write them into the tasks' folder. Unrecoverable when a task is refused."""
        section = self.config.tasks
        for hash, (suite, id) in self._wanted.items():
            if hash not in self._made:
                asked = CertifyAsked(run=self.run, task=TaskRef(suite.name, id), task_hash=hash)
                await self.publish_event(asked, msg_id=f"{self.run}.{hash}.certify")
        while missing := self._wanted.keys() - self._made.keys():
            self.status = f"waiting for {len(missing)} certificates"
            await self.news(self._news, self.status)
        for suite in {suite.name: suite for suite, _ in self._wanted.values()}.values():
            made = [self._made[hash] for hash, (part, _) in self._wanted.items() if part.name == suite.name]
            certificates.write(suite, made, Path(section.dir) / "certificates")
        certified = self._suite, section.dir, False, section.at_risk
        if self._wanted and (refused := await asyncio.to_thread(certificates.refusal, *certified)):
            raise Unrecoverable(refused)
        if self._wanted:
            await self.event(
                "certified", f"{len(self._wanted)} tasks of {self._suite.name} were examined before the run"
            )
        uncertified = section.uncertified or self._offers is not None
        self._certified = None if uncertified else certificates.AtIssue(self._suite, section.dir)

    async def _examined(self, task: TaskRef) -> None:
        """Unrecoverable if a task differs from the certified one."""
        if self._certified is None:
            return
        if refused := await asyncio.to_thread(self._certified.refusal, task.task):
            raise Unrecoverable(refused)

    async def _issue(self, slots: Sequence[SlotIssued]) -> None:
        """Announce the version that rollout actors must serve, then issue the slots."""
        await self._admit(max(issued.min_version for issued in slots))
        await self._issuer.issue(slots)

    async def _close(self, record: GroupClosed | GroupDropped | StalenessBound) -> None:
        """Write a group's end, or a staleness bound, on top of the run's last such record. WrongSequence once a
        successor has written one."""
        if isinstance(record, StalenessBound):
            place, id = BOUND, f"{self.run}.bound.{record.asked_seq}"
        else:
            place, id = record.group, f"{self.run}.{record.group}.end"
        seq = await self.bus.publish(
            CLOSE.at(run=self.run, group=place),
            record,
            msg_id=id,
            expect=self.state.close_seq,
            expect_filter=CLOSE.where(run=self.run),
        )
        self.state.apply(record, seq)

    async def _admit(self, min_version: int) -> None:
        """Store in HR_ADMISSION the oldest version with which a rollout actor may pull the train lane."""
        last = self._admission.min_version if self._admission else -1
        if min_version > last:
            state = await self.bus.kv("HR_ADMISSION")
            self._admission = Admission(
                run=self.run, min_version=min_version, issued=self.state.issued, retired=self.state.retired
            )
            await state.put(admission_key(self.run), self._admission)

    def _own_evaluations(self) -> list[str]:
        during = training.evaluation_ids(self.config, self.state.steps)
        requested = [id for id in during if id in self._evaluations]
        return [*(request.id for request in training.own_evaluations(self.config, self.run)), *requested]

    async def _measure_served(self) -> None:
        """Request the evaluations that are due during training. Only the end of the run waits for their results."""
        await self._ask(training.evaluations_during(self.config, self.run, self.state.steps, self._served))

    async def _ask(self, evaluations: Iterable[EvalRequest]) -> None:
        """Request the evaluations that were not requested before."""
        for ask in evaluations:
            if ask.id not in self._evaluations:
                await self.publish_event(ask, msg_id=f"{self.run}.{ask.id}")
                self._evaluations.setdefault(ask.id, False)

    async def _report_problems(self) -> None:
        """Publish one event for every contradiction in the streams."""
        for problem in self.state.problems[self._reported_problems :]:
            await self.event("ledger_problem", problem, "error")
        self._reported_problems = len(self.state.problems)

    async def _measure(self) -> None:
        state = self.state
        await self.metric(
            groups_issued=state.issued,
            groups_open=len(state.open),
            groups_closed=len(state.closings),
            groups_dropped=state.dropped,
            groups_retired=state.retired,
            served_oldest=await self._oldest_served(),
        )

    async def _oldest_served(self) -> int:
        """The oldest version that a live replica serves, -1 without any. A replica that lags behind causes an event."""
        oldest, wanted = self._ledger.oldest(), self._admission.min_version if self._admission else 0
        alive: set[str] = set()
        if oldest is not None and oldest < self._served:  # otherwise no replica lags behind
            try:
                presence = await self.bus.kv("HR_PRESENCE")
                alive = {key.partition(".")[2] for key in await presence.keys("rollout.>")}
            except BusError:  # the next call tries again
                return oldest
            oldest = self._ledger.oldest(alive)
        for late in self._laggards.overdue(self._ledger, alive, wanted, time.monotonic()):
            text = f"{late.replica} on {late.node} serves version {late.version}, the train lane asks for {wanted}"
            await self.event("replica_behind", text, "warning", version=late.version, wanted=wanted)
        return -1 if oldest is None else oldest
