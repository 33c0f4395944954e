"""The curriculum: which task next, to whom credit is given, how groups end. It keeps the run's books.

What it knows is a fold over the streams (`replay.books`), what it does follows from that (`replay.decisions`). So there
is nothing to save: after a crash it reads the streams again and goes on.

A zombie is refused twice. Whoever starts writes a fence into the ledger, and every SlotIssued names that record as the
last on its subject: the broker takes no write from a holder whose fence is not the newest. Closings are written on top
of the last closing of the run, whose place a fence takes as well.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from headrace.actors import curriculum_requests as requests
from headrace.algorithms.staleness import batch_of, first_batch_of
from headrace.bus.actor import Actor
from headrace.bus.errors import BusError, WrongSequence
from headrace.bus.received import Received
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import (
    Admission,
    BoundAsked,
    Fence,
    GroupClosed,
    GroupDropped,
    SlotIssued,
    StalenessBound,
    admission_key,
)
from headrace.messages.operations import DeadLetter
from headrace.messages.subjects import CLOSE, DLQ, EVENT, FAIL, LEDGER, SCORE, STEP, TASK, token
from headrace.messages.tasks import TaskRef
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from headrace.replay import letters
from headrace.replay.books import Book
from headrace.replay.decisions import Again, Decision, Issue, Rules, bounds_of, decide, finished
from headrace.tasks import open_suite
from headrace.weights import readiness

FENCE = "curriculum"
"""Stands for a group in the subjects of fences."""

BOUND = "bound"
"""Stands for a group in the subjects of staleness bounds."""

LARGEST_BOUND = 64
LAGGARD_S = 30.0
"""A replica that has served too old a version for this long is told of."""


class Curriculum(Actor):
    """StepDone, StepFailed, Score, SlotFailed, DeadLetter in; SlotIssued, RolloutRequest, closings, EvalRequest out."""

    role: ClassVar[str] = "curriculum"

    async def start(self) -> None:
        """Take over the books, read them, then follow the streams and act on them."""
        own = self.config.curriculum
        self.rules = Rules(
            own.group_size, own.groups_per_step, own.staleness, own.steps, own.attempts, own.on_stale, own.speculate
        )
        suite = self.config.tasks.suite
        self.tasks = requests.TaskOrder(open_suite(suite, self.config.tasks.dir).ids(), self.config.run.seed)
        self.book = Book(self.run)
        self._told_problems = 0
        self._admission: Admission | None = None
        self._news = asyncio.Event()
        self._evaluations: dict[str, bool] = {}
        """Asked for so far, by id: whether the answer is there."""
        self._asked: tuple[int, BoundAsked] | None = None
        """The newest wish for another staleness bound, with its sequence."""
        self._served = -1
        """The newest version that is on the wire: some node has staged or serves it."""
        self._ledger, self._laggards = readiness.Ledger(), readiness.Laggards(LAGGARD_S)
        await self._take_over()
        live = {
            "HR_LEDGER": (LEDGER.where(run=self.run), FAIL.where(run=self.run)),
            "HR_SCORE": (SCORE.where(run=self.run), CLOSE.where(run=self.run)),
            "HR_STEP": (STEP.at(run=self.run),),
            "HR_DLQ": (DLQ.where(stream="*"),),
            "HR_EVENT": (
                EVENT.where(run=self.run, actor="*", type=EvalRequest.type_name),
                EVENT.where(run=self.run, actor="*", type=EvalResult.type_name),
                EVENT.where(run=self.run, actor="*", type=BoundAsked.type_name),
                EVENT.where(run=self.run, actor="*", type=WeightsStaged.type_name),
                EVENT.where(run=self.run, actor="*", type=WeightsSwapped.type_name),
            ),
        }
        for stream, filters in live.items():
            last = 0
            async for received in self.bus.history(stream, *filters):
                self._enter(received)
                last = received.seq
            own_words = {LEDGER.where(run=self.run), CLOSE.where(run=self.run)}
            others = [filter for filter in filters if filter not in own_words]
            self.spawn(self._follow(stream, others, last + 1), f"following {stream}")
        self.book.close_seq = max(self.book.close_seq, self._close_fence)
        await self._tell_problems()
        self.spawn(self._work(), "issuing")
        self.every(2.0, self._measure, "metrics")

    async def _take_over(self) -> None:
        """From here on no earlier holder's write is accepted, so what the streams hold now is all there is."""
        fence = Fence(run=self.run, actor=self.name(), id=self.id)
        self._fence_subject = LEDGER.at(run=self.run, group=FENCE)
        self._fence = await self.bus.publish(self._fence_subject, fence)
        self._close_fence = await self.bus.publish(CLOSE.at(run=self.run, group=FENCE), fence)

    async def _follow(self, stream: str, filters: Sequence[str], start: int) -> None:
        async for received in self.bus.follow(stream, *filters, start=start):
            if self._enter(received):
                self._news.set()

    def _enter(self, received: Received[Any]) -> bool:
        """Enter a record into the book; True when it changed something."""
        message = self.message_of(received)
        if message is None or getattr(message, "lane", "train") != "train":
            return False
        match message:
            case DeadLetter():
                lost = letters.lost(message)
                if lost is None or lost.run != self.run:
                    return False
                return self.book.fail(lost.group, lost.slot, lost.attempt, letters.REASON)
            case EvalRequest():
                self._evaluations.setdefault(message.id, False)
                return True
            case EvalResult():
                self._evaluations[message.id] = True
                return True
            case BoundAsked():
                self._asked = (received.seq, message)
                return True
            case WeightsStaged() | WeightsSwapped():
                self._served = max(self._served, message.version)
                self._ledger.hear(message, received.time)
                return True
        return self.book.apply(message, received.seq)

    async def _work(self) -> None:
        try:
            await self._through()
        except WrongSequence as error:
            # Another curriculum has taken over: the books are its own now, and nothing of ours is accepted any more.
            self.status = "superseded"
            await self.event("superseded", str(error), "error")

    async def _through(self) -> None:
        """The run from version 0 to its last evaluation."""
        if not self.book.groups:
            await self._first_version()
        if self.config.evaluation.before:
            await self._evaluate("before", 0)
        await self.event("phase", "reinforcement learning")
        await self._request([a.issued for g in self.book.open.values() for slot in g.slots.values() for a in slot.live])
        while True:
            await self._set_bound()
            while decisions := decide(self.book, self.rules):
                await self._carry_out(decisions)
            await self._tell_problems()
            if finished(self.book, self.rules):
                break
            await self._wait()
        await self.event("phase", "final evaluation")
        if self.config.evaluation.after:
            await self._evaluate("after", self.book.steps)
        while not all(self._evaluations.get(id) for id in self._own_evaluations()):
            await self._wait()
        while self._served < self.book.steps:  # whoever stops the run stops the sender too
            await self._wait()
        self.status = "finished"
        await self.event("run_finished", f"{self.book.steps} steps", steps=self.book.steps, groups=self.book.issued)

    async def _wait(self) -> None:
        open_, steps = len(self.book.open), self.book.steps
        self.status = f"step {steps} of {self.rules.steps}, {open_} groups open"
        with self.waiting():
            await self._news.wait()
        self._news.clear()

    async def _set_bound(self) -> None:
        """Say the staleness bound where the closings are: the configured one at first, then what an operator asks."""
        book, own = self.book, self.config.curriculum
        if book.bounds is None:
            first = batch_of(len(book.closings) + own.groups_per_step - 1, own.groups_per_step)
            await self._close(StalenessBound(run=self.run, bound=own.staleness, first_batch=first))
        answered = max((record.asked_seq for record, _ in book.bound_records), default=0)
        if self._asked is None or self._asked[0] <= answered:
            return
        seq, asked = self._asked
        bounds = bounds_of(book, self.rules)
        if not 0 <= asked.bound <= LARGEST_BOUND:
            text = f"a staleness bound is 0 to {LARGEST_BOUND}, not {asked.bound}"
            await self.event("bound_refused", text, "warning")
            self._asked = None
            return
        first = first_batch_of(
            bounds, asked.bound, len(book.closings), book.index, own.groups_per_step, drop=own.on_stale == "drop"
        )
        await self._close(StalenessBound(run=self.run, bound=asked.bound, first_batch=first, asked_seq=seq))
        text = f"staleness bound {asked.bound} from batch {first} on"
        await self.event("bound_changed", text, bound=asked.bound, first_batch=first)

    async def _first_version(self) -> None:
        """Wait until some engine serves a version."""
        self.status = "waiting for version 0"
        with self.waiting():
            async for _ in self.bus.follow("HR_EVENT", EVENT.where(run=self.run, actor="*", type="weights_swapped")):
                return

    async def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Write decisions down, in the ledger first, and enter them into the book."""
        for decision in decisions:
            match decision:
                case Issue():
                    task = requests.task(self.config, self.tasks, decision.number)
                    known = self.book.groups.get(decision.group)
                    await self._issue(
                        [
                            self._slot(decision, slot, 0, known.first.task if known else task, decision.index)
                            for slot in decision.slots
                        ]
                    )
                case Again():
                    first = self.book.groups[decision.group].first
                    await self._issue([self._slot(decision, decision.slot, decision.attempt, first.task, first.index)])
                    await self.event(
                        "slot_reissued",
                        f"{decision.group} slot {decision.slot}: {decision.reason}",
                        "info" if decision.beside else "warning",
                        attempt=decision.attempt,
                        reason=decision.reason,
                    )
                case GroupClosed():
                    await self._close(decision)
                case GroupDropped():
                    await self._close(decision)
                    text = f"{decision.group}: {decision.reason}: {decision.detail}"
                    await self.event("group_dropped", text, "warning", reason=decision.reason)

    def _slot(self, decision: Issue | Again, slot: int, attempt: int, task: TaskRef, index: int) -> SlotIssued:
        beside = isinstance(decision, Again) and decision.beside
        oldest = decision.min_version
        return requests.slot(self.config, self.run, decision.group, index, slot, attempt, task, oldest, beside)

    async def _issue(self, slots: Sequence[SlotIssued]) -> None:
        """Say what engines must serve, write the slots down, then ask for them."""
        await self._admit(max(issued.min_version for issued in slots))
        where = [LEDGER.at(run=self.run, group=issued.group) for issued in slots]
        seqs = await asyncio.gather(
            *(
                self.bus.publish(
                    subject,
                    issued,
                    msg_id=f"{self.run}.{issued.group}-{issued.slot}-{issued.attempt}",
                    expect=self._fence,
                    expect_filter=self._fence_subject,
                )
                for subject, issued in zip(where, slots, strict=True)
            )
        )
        for issued, seq in zip(slots, seqs, strict=True):
            self.book.apply(issued, seq)
        await self._request(slots)

    async def _request(self, slots: Sequence[SlotIssued]) -> None:
        """Ask for recorded attempts. The broker drops what it has seen; a rollout finds what is finished."""
        asked = [requests.request(self.config, issued) for issued in slots if not self._scored(issued)]
        await asyncio.gather(
            *(
                self.bus.publish(
                    TASK.at(run=self.run, lane=request.lane, suite=token(request.task.suite)),
                    request,
                    msg_id=f"{self.run}.{request.trajectory}",
                )
                for request in asked
            )
        )

    def _scored(self, issued: SlotIssued) -> bool:
        found = self.book.attempt(issued.group, issued.slot, issued.attempt)
        return found is not None and (found.score is not None or bool(found.failed))

    async def _close(self, record: GroupClosed | GroupDropped | StalenessBound) -> None:
        """Write a group's end, or another bound, on top of the last such record of the run."""
        if isinstance(record, StalenessBound):
            place, id = BOUND, f"{self.run}.bound.{record.asked_seq}"
        else:
            place, id = record.group, f"{self.run}.{record.group}.end"
        seq = await self.bus.publish(
            CLOSE.at(run=self.run, group=place),
            record,
            msg_id=id,
            expect=self.book.close_seq,
            expect_filter=CLOSE.where(run=self.run),
        )
        self.book.apply(record, seq)

    async def _admit(self, min_version: int) -> None:
        """Keep in HR_STATE what a rollout must serve to take from the train lane."""
        last = self._admission.min_version if self._admission else -1
        if min_version > last:
            state = await self.bus.kv("HR_STATE")
            self._admission = Admission(
                run=self.run, min_version=min_version, issued=self.book.issued, retired=self.book.retired
            )
            await state.put(admission_key(self.run), self._admission)

    def _own_evaluations(self) -> list[str]:
        own = self.config.evaluation
        wanted = [when for when, asked in (("before", own.before), ("after", own.after)) if asked]
        return [ask.id for when in wanted for ask in requests.evaluations(self.config, self.run, when, 0)]

    async def _evaluate(self, when: str, version: int) -> None:
        """Ask the evaluator, unless that was done before."""
        for ask in requests.evaluations(self.config, self.run, when, version):
            if ask.id not in self._evaluations:
                await self.publish_event(ask, msg_id=f"{self.run}.{ask.id}")
                self._evaluations.setdefault(ask.id, False)

    async def _tell_problems(self) -> None:
        """What should not be in the streams is told once."""
        for problem in self.book.problems[self._told_problems :]:
            await self.event("books", problem, "error")
        self._told_problems = len(self.book.problems)

    async def _measure(self) -> None:
        book = self.book
        await self.metric(
            groups_issued=book.issued,
            groups_open=len(book.open),
            groups_closed=len(book.closings),
            groups_dropped=book.dropped,
            groups_retired=book.retired,
            served_oldest=await self._oldest_served(),
        )

    async def _oldest_served(self) -> int:
        """The oldest version that a living replica serves, -1 without any; who is too old to be given work is told."""
        oldest, wanted = self._ledger.oldest(), self._admission.min_version if self._admission else 0
        alive: set[str] = set()
        if oldest is not None and oldest < self._served:  # else nobody lags, whoever lives
            try:
                presence = await self.bus.kv("HR_PRESENCE")
                alive = {key.partition(".")[2] for key in await presence.keys("rollout.>")}
            except BusError:  # the next look will do
                return oldest
            oldest = self._ledger.oldest(alive)
        for late in self._laggards.overdue(self._ledger, alive, wanted, time.monotonic()):
            text = f"{late.replica} on {late.node} serves version {late.version}, the train lane asks for {wanted}"
            await self.event("replica_behind", text, "warning", version=late.version, wanted=wanted)
        return -1 if oldest is None else oldest
