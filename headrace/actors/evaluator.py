"""The evaluator: measures a policy on tasks that no training process ever saw.

An EvalRequest becomes groups on the eval lane under the policy it names; Scores, failed slots and dead letters come
back through the same streams as for training. Failures of our own parts are tried again and counted apart. The fence
works as the curriculum's does: of two evaluators of a run the older is refused.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from headrace.actors.evaluator_books import Evaluation
from headrace.bus.actor import Actor
from headrace.bus.errors import WrongSequence
from headrace.bus.received import Received
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import Fence, SlotIssued
from headrace.messages.operations import DeadLetter
from headrace.messages.subjects import DLQ, EVENT, FAIL, LEDGER, SCORE, TASK, token
from headrace.replay import letters
from headrace.replay.books import Book
from headrace.tasks import UnknownSuite, open_suite

FENCE = "evaluator"


class Evaluator(Actor):
    """EvalRequest, Score, SlotFailed, DeadLetter in; SlotIssued, RolloutRequest, EvalResult out."""

    role: ClassVar[str] = "evaluator"

    async def start(self) -> None:
        """Read what was asked, issued and answered so far, then follow the streams."""
        self.book = Book(self.run)
        self.open: dict[str, Evaluation] = {}
        self.answered: set[str] = set()
        self._asked: dict[str, tuple[EvalRequest, float]] = {}
        self._news = asyncio.Event()
        fence = Fence(run=self.run, actor=self.name(), id=self.id)
        self._fence_subject = LEDGER.at(run=self.run, group=FENCE)
        self._fence = await self.bus.publish(self._fence_subject, fence)
        streams: dict[str, tuple[str, ...]] = {
            "HR_EVENT": (
                EVENT.where(run=self.run, actor="*", type=EvalRequest.type_name),
                EVENT.where(run=self.run, actor="*", type=EvalResult.type_name),
            ),
            "HR_LEDGER": (LEDGER.where(run=self.run), FAIL.where(run=self.run)),
            "HR_SCORE": (SCORE.where(run=self.run),),
            "HR_DLQ": (DLQ.where(stream="*"),),
        }
        for stream, filters in streams.items():
            last = 0
            async for received in self.bus.history(stream, *filters):
                self._enter(received)
                last = received.seq
            live = [filter for filter in filters if filter != LEDGER.where(run=self.run)]
            self.spawn(self._follow(stream, live, last + 1), f"following {stream}")
        self.spawn(self._work(), "evaluating")

    async def _follow(self, stream: str, filters: Sequence[str], start: int) -> None:
        async for received in self.bus.follow(stream, *filters, start=start):
            if self._enter(received):
                self._news.set()

    def _enter(self, received: Received[Any]) -> bool:
        """Enter a record; True when there may be something to do."""
        message = self.message_of(received)
        match message:
            case EvalRequest():
                return message.id not in self.answered and (
                    self._asked.setdefault(message.id, (message, received.time))[0] is message
                )
            case EvalResult():
                self.answered.add(message.id)
                self._asked.pop(message.id, None)
                return False
            case DeadLetter():
                lost = letters.lost(message)
                return (
                    lost is not None
                    and lost.run == self.run
                    and self.book.fail(lost.group, lost.slot, lost.attempt, letters.REASON)
                )
        if message is None or getattr(message, "lane", "") != "eval":
            return False
        return self.book.apply(message, received.seq)

    async def _work(self) -> None:
        fresh = True
        try:
            while True:
                await self._open()
                for evaluation in list(self.open.values()):
                    if fresh:  # what a predecessor issued: the broker drops what it has seen
                        await self._request(evaluation, list(evaluation.running()))
                    await self._issue(evaluation, evaluation.wanted())
                    await self._answer(evaluation)
                fresh = False
                self.status = f"{len(self.open)} evaluations open"
                with self.waiting():
                    await self._news.wait()
                self._news.clear()
        except WrongSequence as error:
            self.status = "superseded"
            await self.event("superseded", str(error), "error")

    async def _open(self) -> None:
        """Look up the tasks of what was asked; a suite that there is not is answered at once."""
        while self._asked:
            request, asked_at = self._asked.pop(next(iter(self._asked)))
            try:
                ids = open_suite(request.suite, self.config.tasks.dir).ids()
            except UnknownSuite as error:
                await self.event("eval_refused", str(error), "error", id=request.id)
                refusal = EvalResult(
                    id=request.id,
                    run=self.run,
                    suite=request.suite,
                    policy=request.policy,
                    version=request.policy.version,
                    tasks=0,
                    passed=0,
                    rate=0.0,
                    infra_failures=0,
                    reason=f"refused: {error}",
                )
                await self._publish(refusal)
                continue
            count = min(request.tasks or len(ids), len(ids))
            self.open[request.id] = Evaluation(request, asked_at, [ids[n] for n in range(count)], self.book)

    async def _issue(self, evaluation: Evaluation, wanted: Iterable[SlotIssued]) -> None:
        """Write attempts down, then ask for them."""
        slots = list(wanted)
        for issued in slots:
            if issued.attempt:
                last = evaluation.last(issued.group, issued.slot)
                reason = last.failed if last else ""
                await self.event("slot_reissued", f"{issued.group} slot {issued.slot}: {reason}", "warning")
        seqs = await asyncio.gather(
            *(
                self.bus.publish(
                    LEDGER.at(run=self.run, group=issued.group),
                    issued,
                    msg_id=f"{self.run}.{issued.group}-{issued.slot}-{issued.attempt}",
                    expect=self._fence,
                    expect_filter=self._fence_subject,
                )
                for issued in slots
            )
        )
        for issued, seq in zip(slots, seqs, strict=True):
            self.book.apply(issued, seq)
        await self._request(evaluation, slots)

    async def _request(self, evaluation: Evaluation, slots: Iterable[SlotIssued]) -> None:
        await asyncio.gather(
            *(
                self.bus.publish(
                    TASK.at(run=self.run, lane="eval", suite=token(issued.task.suite)),
                    evaluation.rollout(issued),
                    msg_id=f"{self.run}.{issued.group}-{issued.slot}-{issued.attempt}",
                )
                for issued in slots
            )
        )

    async def _answer(self, evaluation: Evaluation) -> None:
        """Publish the result once it is complete."""
        result = evaluation.result(time.time())
        if result is not None:
            await self._publish(result)

    async def _publish(self, result: EvalResult) -> None:
        await self.publish_event(result, msg_id=f"{self.run}.{result.id}.result")
        self.open.pop(result.id, None)
        self.answered.add(result.id)
