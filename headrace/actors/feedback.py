"""The feedback actor: it scores production trajectories by their users' feedback, and promotes versions.

Scores go to a run of their own, ``<run>-feedback``, apart from the training run's. No trainer consumes that run today:
the scores are kept, counted and shown. Scoring needs the tenant's opt-in, and everything that a user gave can be purged
by the user's hash.

Promotion: after every `feedback_batch` scores the newest committed version is evaluated on held-out tasks (the gate),
and it is promoted if its pass rate is at least that of the promoted version. An operator can promote any published
version, also an earlier one, with a Promotion event. The promoted version and its pass rate are a value in HR_STATE:
gateways give it to new sessions, and a restarted feedback actor continues from it.
"""

from typing import ClassVar

import msgspec

from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.ledger.requests import settings_of
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.judging import Score
from headrace.messages.operations import Ack
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.product import Promotion, PurgeUser, promotion_key
from headrace.messages.rollout import PolicyRef, Trajectory
from headrace.messages.weights import WeightHead

JUDGE = "thumbs-1"


def feedback_run(run: str) -> str:
    """The run under which a run's feedback is scored."""
    return f"{run}-feedback"


class Feedback(Actor):
    """User feedback, evaluation results and operators' promotions in; scores, evaluations, promotions, purges out."""

    role: ClassVar[str] = "feedback"

    async def start(self) -> None:
        """Read the promoted version and the number of scores, then consume feedback, results and promotions."""
        self._state = await self.bus.kv("HR_STATE")
        held = await self._state.get(promotion_key(self.run))
        self.promoted = held[0] if held is not None and isinstance(held[0], Promotion) else None
        where = subjects.SCORE.where(run=feedback_run(self.run))
        self.scored = len([received.seq async for received in self.bus.history("HR_SCORE", where)])
        await self.serve(subjects.RPC.at(service="feedback", method="purge"), self._purge_user)
        await self.consume(
            subjects.FEEDBACK,
            self._on_feedback,
            durable=f"feedback-{self.run}",
            filter=subjects.FEEDBACK.where(),
            ack_sync=True,
        )
        await self.consume(
            subjects.EVENT,
            self._on_result,
            durable=f"feedback-eval-{self.run}",
            filter=subjects.EVENT.where(run=self.run, actor="evaluator", type="eval_result"),
        )
        await self.consume(
            subjects.EVENT,
            self._on_promotion,
            durable=f"feedback-promotion-{self.run}",
            filter=subjects.EVENT.where(run=self.run, actor="operator", type="promotion"),
        )

    async def _on_feedback(self, received: Received[UserFeedback]) -> None:
        """Score the trajectory that the feedback is about, once."""
        feedback = received.message
        if feedback.run != self.run:
            return
        if not feedback.training_allowed:
            await self.event("feedback_kept", "the tenant did not opt in to training", tenant=feedback.tenant)
            return
        group = feedback.trajectory.rsplit("-", 2)[0]
        last = await self.bus.last("HR_TRAJ", subjects.TRAJ.at(run=self.run, group=group))
        if last is None or not isinstance(last.message, Trajectory):
            await self.event("feedback_orphaned", f"{feedback.trajectory} is not in HR_TRAJ any more", "warning")
            return
        await self._score(feedback, last.message, last.seq)

    async def _score(self, feedback: UserFeedback, trajectory: Trajectory, seq: int) -> None:
        """Publish the Score. Its message id names trajectory and thumb, so the same feedback counts once."""
        up = feedback.thumb == "up"
        sampled = [len(turn.ids) for turn in trajectory.turns]
        score = Score(
            run=feedback_run(self.run),
            lane="production",
            group=trajectory.group,
            slot=trajectory.slot,
            attempt=trajectory.attempt,
            trajectory_seq=seq,
            task=trajectory.task,
            family=trajectory.family,
            judge_version=JUDGE,
            verdict="passed" if up else "failed",
            reward=1.0 if up else 0.0,
            passed=up,
            oldest_version=trajectory.oldest_version,
            sampled_tokens=sum(sampled),
            turns=len(sampled),
            calls=sum(len(turn.calls) for turn in trajectory.turns),
        )
        subject = subjects.SCORE.at(run=score.run, judge=JUDGE, group=score.group)
        stored = await self.bus.publish(subject, score, msg_id=f"{score.run}.{trajectory.id}.{JUDGE}.{feedback.thumb}")
        self.scored += 1
        await self.event("feedback_scored", trajectory.id, thumb=feedback.thumb, scored=self.scored)
        rules = self.config.production
        if rules.gate_tasks and self.scored % rules.feedback_batch == 0:
            await self._ask_gate(f"gate{stored}")

    async def _newest_version(self) -> int:
        """The newest committed version, -1 before the first."""
        head = await self.bus.last("HR_WEIGHTS", subjects.WEIGHT_HEAD.at(run=self.run))
        return head.message.version if head is not None and isinstance(head.message, WeightHead) else -1

    async def _ask_gate(self, id: str) -> None:
        """Evaluate the newest committed version on held-out tasks. id: unique also across restarts."""
        version = await self._newest_version()
        if version < 0 or (self.promoted is not None and self.promoted.version == version):
            return
        settings = settings_of(self.config, temperature=1.0)
        request = EvalRequest(
            id=id,
            run=self.run,
            suite=self.config.tasks.heldout,
            tasks=self.config.production.gate_tasks,
            policy=PolicyRef(kind="pinned", version=version),
            sampling=settings.sampling,
            limits=settings.limits,
            isolation=settings.isolation,
            reason="gate",
        )
        await self.publish_event(request, msg_id=f"{self.run}.{id}")

    async def _on_result(self, received: Received[EvalResult]) -> None:
        """Promote a version that passes at least as many tasks as the promoted one."""
        result = received.message
        if not result.id.startswith("gate"):
            return
        if result.tasks <= result.infra_failures:
            text = f"version {result.version}: no task was measured ({result.reason})"
            await self.event("gate_inconclusive", text, "warning", version=result.version)
            return
        previous = self.promoted.rate if self.promoted is not None else 0.0
        if result.rate < previous:
            text = f"version {result.version}: pass rate {result.rate:.2f}, below {previous:.2f} of the promoted one"
            await self.event("gate_refused", text, "warning", version=result.version)
            return
        promotion = Promotion(
            run=self.run,
            version=result.version,
            eval_id=result.id,
            rate=result.rate,
            previous_rate=previous,
            reason="gate passed",
        )
        await self._promote(promotion)
        await self.publish_event(promotion, msg_id=f"{self.run}.promotion.{result.id}")

    async def _on_promotion(self, received: Received[Promotion]) -> None:
        """Promote what an operator asks for, if it was ever published."""
        promotion = received.message
        newest = await self._newest_version()
        if not 0 <= promotion.version <= newest:
            text = f"expected a published version from 0 to {newest}, got {promotion.version}"
            await self.event("promotion_refused", text, "warning", version=promotion.version)
            return
        if not promotion.eval_id and self.promoted is not None:  # no rate of its own: the gate keeps its baseline
            promotion = msgspec.structs.replace(promotion, rate=self.promoted.rate)
        await self._promote(promotion)

    async def _promote(self, promotion: Promotion) -> None:
        """Keep the promotion, from which gateways read the version and the gate its baseline."""
        await self._state.put(promotion_key(self.run), promotion)
        self.promoted = promotion
        text = f"version {promotion.version}, pass rate {promotion.rate:.2f}: {promotion.reason}"
        await self.event("promoted", text, version=promotion.version, rate=promotion.rate)

    async def _purge_user(self, message: Message) -> Ack:
        """Remove everything under a user's hash."""
        if not isinstance(message, PurgeUser) or not message.user.isalnum():
            return Ack(ok=False, detail="a purge names one user hash")
        removed = 0
        for stream, filter in (
            ("HR_FEEDBACK", f"hr.feedback.*.{message.user}"),
            ("HR_TRAJ", f"hr.traj.*.{message.user}.*"),
            ("HR_TURN", f"hr.turn.*.{message.user}.*"),
            ("HR_SCORE", f"hr.score.*.*.{message.user}.*"),
            ("HR_BLOB", f"hr.blob.{message.user}.>"),
        ):
            removed += await self.bus.purge(stream, subject=filter)
        await self.event("user_purged", f"{removed} messages", user=message.user, messages=removed)
        return Ack(detail=f"{removed} messages removed")
