"""The ledger of the branch run: every rated session becomes a group of one rollout, closed in the order of its batches.

In the branch the feedback actor replaces the curriculum: it alone writes SlotIssued and GroupClosed there. It writes
each closing on top of the last one, so the broker refuses a second feedback actor. It copies the sessions under the
branch's name, with the branch's version numbers, and with their user's hash in the subject, so that a purge deletes
them.

A rating in a batch has four records: SlotIssued, Trajectory, Score, GroupClosed. After a crash the existing records are
reused.
"""

from typing import NamedTuple

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone
from headrace.bus.runtime import tracing
from headrace.config import Config, branch_name
from headrace.ledger.feedback import Rating
from headrace.ledger.seeds import seed_of
from headrace.ledger.state import RunState
from headrace.messages.judging import Score
from headrace.messages.ledger import ClosedSlot, Fence, GroupClosed, GroupDropped, SlotIssued, StalenessBound
from headrace.messages.product import Branch, Feedback, Promotion, branch_key
from headrace.messages.rollout import PolicyRef, Span, Trajectory
from headrace.messages.subjects import CLOSE, LEDGER, SCORE, STEP, TRAJ, WEIGHT_HEAD

JUDGE = "thumbs-1"
FENCE, BOUND = "feedback.fence", "feedback.bound"
"""Names that take a group's place in the subjects of closings."""


class Rated(NamedTuple):
    """The session of a rating: its Trajectory, and the time at which it was stored, in seconds since the epoch."""

    trajectory: Trajectory
    time: float
    origin: tracing.Link | None
    """The span that published it."""


def score_of(feedback: Feedback, trajectory: Trajectory, trajectory_seq: int) -> Score:
    """The verdict of a user on a trajectory of the train lane."""
    up = feedback.thumb == "up"
    return Score(
        run=trajectory.run,
        lane="train",
        group=trajectory.group,
        slot=trajectory.slot,
        attempt=trajectory.attempt,
        trajectory_seq=trajectory_seq,
        task=trajectory.task,
        family=trajectory.family,
        judge_version=JUDGE,
        verdict="passed" if up else "failed",
        reward=(1.0 if up else 0.0) if feedback.reward is None else feedback.reward,
        passed=up,
        oldest_version=trajectory.oldest_version,
        sampled_tokens=sum(len(turn.ids) for turn in trajectory.turns),
        turns=len(trajectory.turns),
        calls=sum(len(turn.calls) for turn in trajectory.turns),
    )


class BranchLedger:
    """The branch of one run: its state from the streams, and the writes to it."""

    def __init__(self, bus: Bus, config: Config, run: str) -> None:
        self._bus, self._config, self._run = bus, config, run
        self.name = branch_name(run, config.feedback)
        self.state = RunState(self.name)
        self.base: Branch | None = None
        """None until a version of the run is promoted."""
        self.step_seq = 0
        """Sequence of the last record of the branch's steps that was read."""
        self._fence_seq = 0

    async def recover(self, actor: str, id: str) -> None:
        """Write a fence, so that the broker refuses earlier feedback actors, then read the branch."""
        fence = Fence(run=self.name, actor=actor, id=id)
        close_seq = self._fence_seq = await self._bus.publish(CLOSE.at(run=self.name, group=FENCE), fence)
        values = await self._bus.kv("HR_PRODUCT")
        entry = await values.get(branch_key(self.name))
        self.base = entry[0] if entry is not None and isinstance(entry[0], Branch) else None
        for stream, *filters in (
            ("HR_LEDGER", LEDGER.where(run=self.name)),
            ("HR_SCORE", SCORE.where(run=self.name), CLOSE.where(run=self.name)),
            ("HR_STEP", STEP.at(run=self.name)),
        ):
            async for received in self._bus.history(stream, *filters):
                self.state.apply(received.message, received.seq)
                if stream == "HR_STEP":
                    self.step_seq = received.seq
        self.state.close_seq = max(self.state.close_seq, close_seq)
        if self.base is not None and self.state.bounds is None:
            await self._bound()

    async def successor(self) -> Fence:
        """Wait for the fence of a feedback actor that started after this one."""
        async for received in self._bus.follow(
            "HR_SCORE", CLOSE.at(run=self.name, group=FENCE), start=self._fence_seq + 1
        ):
            if isinstance(received.message, Fence):
                return received.message
        raise AssertionError("`Bus.follow` ended, which it never does")

    async def open(self, promotion: Promotion) -> bool:
        """Begin the branch at a promoted version of the run. False if the branch exists, or if the version belongs to a
        branch."""
        if self.base is not None or promotion.branch:
            return False
        heads = self._bus.history("HR_WEIGHTS", WEIGHT_HEAD.at(run=self._run))
        hashes = {received.message.version: received.message.state_hash async for received in heads}
        record = Branch(
            run=self.name,
            base_run=self._run,
            base_version=promotion.version,
            base_hash=hashes[promotion.version],
        )
        values = await self._bus.kv("HR_PRODUCT")
        await values.put(branch_key(self.name), record)
        self.base = record
        await self._bound()
        return True

    async def _bound(self) -> None:
        await self._close(BOUND, StalenessBound(run=self.name, bound=self._config.feedback.staleness, first_batch=0))

    @property
    def places(self) -> int:
        """Number of ratings in batches so far."""
        return len(self.state.closings)

    def version_of(self, policy: PolicyRef) -> int | None:
        """A policy's version number in the branch; None for a policy that is not one of its versions."""
        if policy.kind != "pinned" or self.base is None:
            return None
        if policy.run == self.name:
            return policy.version
        return 0 if not policy.run and policy.version == self.base.base_version else None

    def oldest_version(self, trajectory: Trajectory) -> int | None:
        """The oldest branch version that sampled a token of a trajectory; None if a version outside the branch sampled
        any."""
        base = self.base
        versions = {span.version for turn in trajectory.turns for span in turn.spans if len(turn.ids)}
        if base is None or not versions:
            return None
        if trajectory.policy.run == self.name:
            return min(versions)
        return 0 if not trajectory.policy.run and versions == {base.base_version} else None

    async def place(self, rating: Rating, session: Rated, baseline: float | None = None) -> str:
        """Add a rated session to the current batch. Returns the group's name. WrongSequence once another feedback actor
        has taken over.

        baseline: as in Score. The group is a trace of its own, linked to the rating and to the session; the branch's
        step links to its records."""
        feedback, trajectory = rating.feedback, session.trajectory
        assert feedback is not None
        attributes = {"hr.run": self.name, "hr.group": trajectory.group, "hr.trajectory": trajectory.id}
        links = [await self._origin(rating.seq), session.origin]
        with tracing.span("place rating", root=True, links=links, attributes=attributes):
            return await self._place(feedback, trajectory, baseline)

    async def _origin(self, seq: int) -> tracing.Link | None:
        """A link to the span that published a rating; None for a rating that was purged meanwhile."""
        try:
            return tracing.link(await self._bus.get("HR_FEEDBACK", seq))
        except MessageGone:
            return None

    async def _place(self, feedback: Feedback, trajectory: Trajectory, baseline: float | None) -> str:
        group, oldest = trajectory.group, self.oldest_version(trajectory)
        assert oldest is not None, f"no version of {self.name} sampled {trajectory.id}"
        entry = self.state.groups.get(group)
        if entry is not None and entry.closings:
            return group
        if entry is None:
            await self._issue(trajectory)
        trajectory_seq = await self._copy(trajectory)
        score = await self._score(feedback, trajectory, trajectory_seq, oldest, baseline)
        slot = ClosedSlot(
            slot=0,
            attempt=0,
            trajectory_seq=trajectory_seq,
            score_seq=score[0],
            reward=score[1].reward,
            oldest_version=oldest,
        )
        closed = GroupClosed(
            run=self.name, group=group, task=trajectory.task, group_size=1, slots=(slot,), oldest_version=oldest
        )
        await self._close(group, closed)
        return group

    async def give_up(self, group: str, why: str) -> None:
        """Drop a group that was issued and cannot be trained on. why: the detail of its GroupDropped."""
        entry = self.state.groups.get(group)
        if entry is not None and entry.open:
            dropped = GroupDropped(run=self.name, group=group, reason="cancelled", detail=why, group_size=1)
            await self._close(group, dropped)

    async def _issue(self, trajectory: Trajectory) -> None:
        issued = SlotIssued(
            run=self.name,
            lane="train",
            group=trajectory.group,
            index=self.state.index,
            slot=0,
            attempt=0,
            group_size=1,
            task=trajectory.task,
            seed=seed_of(self._config.run.seed, self.name, trajectory.group),
            min_version=0,
        )
        seq = await self._bus.publish(LEDGER.at(run=self.name, group=trajectory.group), issued, expect=0)
        self.state.apply(issued, seq)

    async def _copy(self, trajectory: Trajectory) -> int:
        subject = TRAJ.at(run=self.name, group=trajectory.group)
        last = await self._bus.last("HR_TRAJ", subject)
        if last is not None:
            return last.seq
        turns = trajectory.turns
        if trajectory.policy.run != self.name:  # the base version is the branch's version 0
            turns = tuple(
                msgspec.structs.replace(turn, spans=tuple(Span(span.start, span.end, 0) for span in turn.spans))
                for turn in turns
            )
        copied = msgspec.structs.replace(
            trajectory, run=self.name, lane="train", slot=0, attempt=0, id=f"{trajectory.group}-0-0", turns=turns
        )
        return await self._bus.publish(subject, copied)

    async def _score(
        self, feedback: Feedback, trajectory: Trajectory, trajectory_seq: int, oldest: int, baseline: float | None
    ) -> tuple[int, Score]:
        subject = SCORE.at(run=self.name, judge=JUDGE, group=trajectory.group)
        last = await self._bus.last("HR_SCORE", subject)
        if last is not None and isinstance(last.message, Score):
            self.state.apply(last.message, last.seq)
            return last.seq, last.message
        copied = msgspec.structs.replace(trajectory, run=self.name, slot=0, attempt=0)
        score = msgspec.structs.replace(
            score_of(feedback, copied, trajectory_seq), oldest_version=oldest, baseline=baseline
        )
        seq = await self._bus.publish(subject, score)
        self.state.apply(score, seq)
        return seq, score

    async def _close(self, group: str, record: GroupClosed | GroupDropped | StalenessBound) -> None:
        seq = await self._bus.publish(
            CLOSE.at(run=self.name, group=group),
            record,
            expect=self.state.close_seq,
            expect_filter=CLOSE.where(run=self.name),
        )
        self.state.apply(record, seq)
