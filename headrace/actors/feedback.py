"""The feedback actor: thumbs become scored production trajectories of a run of their own, behind a gate.

The run id is ``<run>-feedback``: a trainer consumes it when an operator says so, never by accident. Training on user
data is opt-in per tenant, and whatever a user gave can be purged by the user's hash.
"""

from typing import ClassVar

from headrace.bus.actor import Actor
from headrace.bus.received import Received
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.judging import Score
from headrace.messages.operations import Ack
from headrace.messages.product import Feedback as Thumb
from headrace.messages.product import Promotion, PurgeUser
from headrace.messages.rollout import PolicyRef, Trajectory
from headrace.messages.weights import WeightHead

JUDGE = "thumbs-1"


def feedback_run(run: str) -> str:
    """The run under which thumbs of a run are scored."""
    return f"{run}-feedback"


class Feedback(Actor):
    """Thumbs in; scores, gate requests, promotions and purges out."""

    role: ClassVar[str] = "feedback"

    async def start(self) -> None:
        """Count what was scored before, then take thumbs and gate results."""
        self.scored = 0
        self.rate = 0.0
        await self.serve(subjects.RPC.at(service="feedback", method="purge"), self.purge_user)
        await self.consume(
            subjects.FEEDBACK,
            self.on_thumb,
            durable=f"feedback-{self.run}",
            filter=subjects.FEEDBACK.where(),
            ack_sync=True,
        )
        await self.consume(
            subjects.EVENT,
            self.on_result,
            durable=f"feedback-eval-{self.run}",
            filter=subjects.EVENT.where(run=self.run, actor="evaluator", type="eval_result"),
        )

    async def on_thumb(self, received: Received[Thumb]) -> None:
        """Score the trajectory that the thumb is about, once."""
        thumb = received.message
        if thumb.run != self.run:
            return
        if not thumb.training_allowed:
            await self.event("thumb_kept", "the tenant did not opt in to training", tenant=thumb.tenant)
            return
        group = thumb.trajectory.rsplit("-", 2)[0]
        found = await self.bus.last("HR_TRAJ", subjects.TRAJ.at(run=self.run, group=group))
        if found is None or not isinstance(found.message, Trajectory):
            await self.event("thumb_orphaned", f"{thumb.trajectory} is not in the stream any more", level="warning")
            return
        await self.score(thumb, found.message, found.seq)

    async def score(self, thumb: Thumb, trajectory: Trajectory, seq: int) -> None:
        """Publish the Score; the message id is the trajectory's, so a second thumb of the same kind adds nothing."""
        up = thumb.thumb == "up"
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
        await self.bus.publish(subject, score, msg_id=f"{score.run}.{trajectory.id}.{JUDGE}.{thumb.thumb}")
        self.scored += 1
        await self.event("thumb_scored", trajectory.id, thumb=thumb.thumb, scored=self.scored)
        rules = self.config.production
        if rules.gate_tasks and self.scored % rules.feedback_batch == 0:
            await self.ask_gate()

    async def ask_gate(self) -> None:
        """Measure the newest committed version on held-out tasks before users may get it."""
        head = await self.bus.last("HR_WEIGHTS", subjects.WEIGHT_HEAD.at(run=self.run))
        if head is None or not isinstance(head.message, WeightHead):
            return
        request = EvalRequest(
            id=f"gate{self.scored}",
            run=self.run,
            suite=self.config.tasks.heldout,
            tasks=self.config.production.gate_tasks,
            policy=PolicyRef(kind="pinned", version=head.message.version),
            reason="gate",
        )
        await self.publish_event(request)

    async def on_result(self, received: Received[EvalResult]) -> None:
        """Promote a version that is at least as good as the promoted one."""
        result = received.message
        if result.reason != "gate":
            return
        if result.rate < self.rate:
            text = f"version {result.version}: {result.rate:.2f}, below {self.rate:.2f}"
            await self.event("gate_refused", text, level="warning", version=result.version)
            return
        promotion = Promotion(
            run=self.run,
            version=result.version,
            eval_id=result.id,
            rate=result.rate,
            previous_rate=self.rate,
            reason="gate passed",
        )
        self.rate = result.rate
        await self.publish_event(promotion)

    async def purge_user(self, message: Message) -> Ack:
        """Remove everything under a user's hash; a replay of a step that used it answers `purged` from then on."""
        if not isinstance(message, PurgeUser) or not message.user.isalnum():
            return Ack(ok=False, detail="a purge names one user hash")
        gone = 0
        for stream, filter in (
            ("HR_FEEDBACK", f"hr.feedback.*.{message.user}"),
            ("HR_TRAJ", f"hr.traj.*.{message.user}.*"),
            ("HR_TURN", f"hr.turn.*.{message.user}.*"),
            ("HR_SCORE", f"hr.score.*.*.{message.user}.*"),
            ("HR_BLOB", f"hr.blob.{message.user}.>"),
        ):
            gone += await self.bus.purge(stream, subject=filter)
        await self.event("user_purged", f"{gone} messages", user=message.user, messages=gone)
        return Ack(detail=f"{gone} messages removed")
