"""The evaluator: measures a policy on tasks that it was never trained on.

An EvalRequest becomes groups on the eval lane, sampled by the policy that it names. Scores, failed slots and dead
letters arrive through the same streams as for training. A slot that failed because of the infrastructure is tried again
and counted separately. Like a curriculum, an evaluator writes a fence: the broker refuses the older of two evaluators.
"""

import asyncio
import time
from typing import Any, ClassVar

from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.ledger import lost_attempts
from headrace.ledger.evaluation import Evaluation
from headrace.ledger.issuer import Issuer
from headrace.ledger.state import RunState
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import RolloutRequest
from headrace.messages.subjects import DLQ, EVENT, FAIL, LEDGER, SCORE
from headrace.tasks import UnknownSuite, open_suite

FENCE = "evaluator"


class Evaluator(Actor):
    """EvalRequest, Score, SlotFailed, DeadLetter in; SlotIssued, RolloutRequest, EvalResult out."""

    role: ClassVar[str] = "evaluator"

    async def start(self) -> None:
        """Read the stored requests, attempts and results, then follow the streams."""
        self.state = RunState(self.run)
        self.open: dict[str, Evaluation] = {}
        self.answered: set[str] = set()
        self._asked: dict[str, tuple[EvalRequest, float]] = {}
        self._news = asyncio.Event()
        self._issuer = Issuer(self.bus, self.state, self._request_of)
        await self._issuer.fence(FENCE, self.name(), self.id)
        streams: dict[str, tuple[str, ...]] = {
            "HR_EVENT": (
                EVENT.where(run=self.run, actor="*", type=EvalRequest.type_name),
                EVENT.where(run=self.run, actor="*", type=EvalResult.type_name),
            ),
            "HR_LEDGER": (LEDGER.where(run=self.run), FAIL.where(run=self.run)),
            "HR_SCORE": (SCORE.where(run=self.run),),
            "HR_DLQ": (DLQ.where(stream="*"),),
        }
        await self.recover_and_follow(streams, self._apply, self._news, written_here=(LEDGER.where(run=self.run),))
        self.spawn(self.until_superseded(self._work), "evaluating")

    def _apply(self, received: Received[Any]) -> bool:
        """Apply a record; True when the evaluator may have to act on it."""
        message = received.message
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
                lost = lost_attempts.lost_attempt(message)
                return (
                    lost is not None
                    and lost.run == self.run
                    and self.state.fail(lost.group, lost.slot, lost.attempt, lost_attempts.REASON)
                )
        if getattr(message, "lane", "") != "eval":
            return False
        return self.state.apply(message, received.seq)

    async def _work(self) -> None:
        recovered = False
        while True:
            await self._open()
            for evaluation in list(self.open.values()):
                if not recovered:  # a predecessor may have ended after the ledger record and before the request
                    await self._issuer.request(list(evaluation.running()))
                await self._issue(evaluation)
                await self._answer(evaluation)
            recovered = True
            self.status = f"{len(self.open)} evaluations open"
            await self.news(self._news, f"scores of evaluation {next(iter(self.open))}" if self.open else "")

    async def _open(self) -> None:
        """Look up the tasks of new requests. A request for an unknown suite gets a result with the reason at once."""
        while self._asked:
            request, asked_at = self._asked.pop(next(iter(self._asked)))
            try:
                suite = open_suite(request.suite, self.config.tasks.dir)
                ids = [suite.task(id).ref.task for id in request.ids] or suite.ids()
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
            self.open[request.id] = Evaluation(request, asked_at, [ids[n] for n in range(count)], self.state)

    def _request_of(self, issued: SlotIssued) -> RolloutRequest:
        """The RolloutRequest of an attempt, from the evaluation of its group."""
        name = issued.group.rpartition("-")[0]
        return next(each for each in self.open.values() if each.name == name).rollout_request(issued)

    async def _issue(self, evaluation: Evaluation) -> None:
        """Issue the attempts that are due."""
        slots = list(evaluation.to_issue())
        for issued in slots:
            if issued.attempt:
                last = evaluation.last(issued.group, issued.slot)
                reason = last.failed if last else ""
                await self.event("slot_reissued", f"{issued.group} slot {issued.slot}: {reason}", "warning")
        await self._issuer.issue(slots)

    async def _answer(self, evaluation: Evaluation) -> None:
        """Publish the result once it is complete."""
        result = evaluation.result(time.time())
        if result is not None:
            await self._publish(result)

    async def _publish(self, result: EvalResult) -> None:
        await self.publish_event(result, msg_id=f"{self.run}.{result.id}.result")
        self.open.pop(result.id, None)
        self.answered.add(result.id)
