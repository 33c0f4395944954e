"""The feedback actor: ratings of users become batches of a branch run, and its versions go through the gate.

Every rating ends in exactly one way (`ledger.feedback`): it is trained on, late, capped, opted out, unattributed,
superseded, purged or discarded. Until then it waits. A rating is examined when it arrives, and again when a batch is
made: in between, a tenant may opt out, or a user's data may be purged.

The branch (`branch`) begins at the first version that is promoted while `[feedback] enabled` is set. A trainer actor in
a process of its own trains it. The newest version of the branch becomes a candidate when no other candidate is at the
gate (`candidates`). Promotion and rollback change one value in HR_PRODUCT that gateways follow.

The actor reads all of its state from the streams when it starts. Of two feedback actors of a run the later one acts.
The earlier one stays idle and does not end: after a restart by a supervisor, its new fence would end the later one.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from headrace.actors.feedback.branch import BranchLedger, Rated
from headrace.actors.feedback.candidates import Candidates
from headrace.actors.feedback.consent import Consent
from headrace.actors.feedback.groups import ClientGroups, grouped, tree_of
from headrace.actors.feedback.purge import Purges
from headrace.actors.feedback.replays import Replays
from headrace.bus.broker.callers import callers
from headrace.bus.errors import WrongSequence
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.tracing import link
from headrace.ledger.feedback import ENDS, FeedbackBook, Rating, gated, outranks
from headrace.ledger.state import Attempt
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalResult
from headrace.messages.operations import Ack
from headrace.messages.product import CLIENT_SUITE, AskFate, Fate, FeedbackSettled, Promotion, ShadowTurn
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.rollout import PolicyRef, Trajectory
from headrace.messages.weights import WeightHead

CAP_S = 86400.0
"""Seconds over which `[feedback] user_cap` counts the ratings of a user."""
LATE_S = 86400.0
"""A rating that arrives later than this after its session is not trained on."""
EXAMINED_S = 2.0
"""The longest wait for the examination of a rating that somebody asks about."""
NOT_COUNTED = ("unattributed", "superseded", "capped")
"""Fates of ratings that the gate does not count."""


class Feedback(Actor):
    """Ratings, evaluation results, shadow turns and operators' promotions in; the branch's ledger, verdicts, promotions
    and purges out."""

    role: ClassVar[str] = "feedback"

    async def start(self) -> None:
        """Read the ledger of ratings, the branch and the gate, then follow the streams."""
        self.book = FeedbackBook(self.run)
        self.branch = BranchLedger(self.bus, self.config, self.run)
        self.gate = Candidates(self.bus, self.config, self.run, self.publish_event)
        self._consent = Consent(self.bus, self.config)
        self.replays = Replays(self.config, self.run, self.publish_event)
        self.groups = (
            ClientGroups(self.bus, self.config, self.run, self.publish_event)
            if self.config.tasks.suite == CLIENT_SUITE
            else None
        )
        """None where the run takes its tasks from a suite: then the branch alone trains on sessions."""
        self._newest: dict[str, Rating] = {}
        """Trajectory to its newest rating that waits or has a place in a batch."""
        self._heads: dict[int, WeightHead] = {}
        """Version of the branch to its head record."""
        self._judged: set[int] = set()
        """Branch versions that have been candidates."""
        self._stalled = -1
        self._one_at_a_time = asyncio.Lock()
        self._news, self._examined = asyncio.Event(), asyncio.Event()
        folder = Path(self.config.run.dir) / self.run
        trained = self.groups.state if self.groups is not None else self.branch.state
        shared = (self.book, self.branch, trained, self._one_at_a_time)
        self.purges = Purges(self.bus, self.run, folder, *shared, self.event)
        await self.purges.recover()
        await self.gate.recover()
        await self.branch.recover(self.name(), self.id)
        filters = (subjects.FEEDBACK.where(), subjects.FATE.where(run=self.run))
        after = 0
        async for received in self.bus.history("HR_FEEDBACK", *filters):
            self.book.apply(received.message, received.seq, received.time)
            after = received.seq
        for rating in self.book.ratings.values():
            if rating.fate == "closed" and rating.feedback is not None:
                self._newest[rating.feedback.trajectory] = rating
        if self.groups is not None:
            await self.recover_and_follow(self.groups.streams, self.groups.apply, self._news)
        self._acting = [
            self._act(self._follow_results(), "evaluation results"),
            self._act(self._follow_branch(), "the branch's steps"),
            self._act(self._follow_versions(), "the branch's versions"),
            self._act(self._work(after), "batches and candidates"),
            self.every(1.0, self._tick, "time"),
            self.every(5.0, self._measure, "figures"),
            self.every(5.0, self.purges.sweep, "late records of purged users"),
        ]
        for caller in callers("feedback", "fate"):
            await self.serve(subjects.RPC.at(service="feedback", caller=caller, method="fate"), self._tell)
        for caller in callers("feedback", "dropped"):
            await self.listen(subjects.RPC.at(service="feedback", caller=caller, method="dropped"), self.purges.dropped)
        self._purging = [
            await self.serve(subjects.RPC.at(service="feedback", caller=caller, method="purge"), self.purges.answer)
            for caller in callers("feedback", "purge")
        ]
        await self.consume(
            subjects.EVENT,
            self._on_promotion,
            durable=f"feedback-promotion-{self.run}",
            filter=subjects.EVENT.where(run=self.run, actor="operator", type="promotion"),
        )
        await self.consume(
            subjects.EVENT,
            self._on_shadow,
            durable=f"feedback-shadow-{self.run}",
            filter=subjects.EVENT.where(run=self.run, actor="gateway", type="shadow_turn"),
        )
        self.spawn(self._watch_successor(), "a successor")

    def _act(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[Any]:
        """A background task that may write to the branch. It ends when the broker refuses a write, because then a
        successor acts."""

        async def until_refused() -> None:
            with suppress(WrongSequence):
                await work

        return self.spawn(until_refused(), name)

    async def _watch_successor(self) -> None:
        """Become idle once a later feedback actor of this run has written its fence.

        This actor does not end: a supervisor would restart it, and its fence would end the successor."""
        successor = await self.branch.successor()
        self.status = "superseded"
        for task in self._acting:
            task.cancel()
        for subscription in self._purging:
            await self.unserve(subscription)
        await asyncio.gather(*(consumer.halt() for consumer in self._consumers))
        await self.event("superseded", f"{successor.actor} {successor.id} acts for this run now", "error")

    @property
    def promoted(self) -> Promotion | None:
        """The version that serves production."""
        return self.gate.promoted

    # Ratings

    async def _follow_ratings(self, after: int) -> None:
        async for received in self.bus.follow("HR_FEEDBACK", subjects.FEEDBACK.where(), start=after + 1):
            async with self._one_at_a_time:
                if self.book.apply(received.message, received.seq, received.time):
                    await self._examine(self.book.ratings[received.seq])
            self._news.set()
            examined, self._examined = self._examined, asyncio.Event()
            examined.set()

    async def _tell(self, message: Message) -> FeedbackSettled | Ack:
        """Answer an AskFate."""
        if not isinstance(message, AskFate):
            return Ack(ok=False, detail="expected an AskFate")
        try:
            async with asyncio.timeout(EXAMINED_S):
                while True:
                    examined = self._examined
                    async with self._one_at_a_time:
                        rating = self.book.newest(message.trajectory)
                    if rating is not None and rating.seq >= message.since:
                        break
                    await examined.wait()
        except TimeoutError:
            return Ack(detail="the feedback actor has not examined it yet")
        if not rating.fate:
            return Ack(detail="it waits for a batch")
        return FeedbackSettled(run=self.run, feedback_seq=rating.seq, fate=rating.fate, detail=rating.detail)  # type: ignore[arg-type]

    async def _examine(self, rating: Rating) -> None:
        """Settle a rating that cannot be trained on, and count the rating at the gate."""
        feedback = rating.feedback
        assert feedback is not None
        session = await self._session(feedback)
        counts = gated(self._newest.get(feedback.trajectory), feedback)
        fate, detail = await self._fate(rating, feedback, session)
        if session is not None and counts and fate not in NOT_COUNTED:
            served = session.trajectory
            await self.gate.on_rating(served.policy, feedback.thumb == "up", rating.seq, session.time - served.wall_s)
        if fate is not None:
            await self._settle(rating, fate, detail)
        elif session is not None:
            self._newest[feedback.trajectory] = rating
            if self.groups is not None:
                self.groups.note(rating, session.trajectory)
            await self.replays.ready(session.trajectory)  # asked for now, so that the batch waits less

    async def _fate(self, rating: Rating, feedback: UserFeedback, session: Rated | None) -> tuple[Fate | None, str]:
        """The fate of a rating and its detail; (None, "") when it waits for a batch. May settle an earlier rating."""
        if session is None:
            return "unattributed", f"{feedback.trajectory} is not in HR_TRAJ"
        earlier = self._newest.get(feedback.trajectory)
        if earlier is not None and earlier.fate == "closed":
            place = "its session has a place in a batch already"
            first = earlier.feedback
            return "late", place if first is None or first.final else f"{place}, with its provisional outcome"
        if earlier is not None and earlier is not rating and not earlier.fate:
            if outranks(earlier.feedback, feedback):
                return "superseded", f"record {earlier.seq} is a stronger signal on this session"
            await self._settle(earlier, "superseded", f"rated again by record {rating.seq}")
        rules = self.config.feedback
        group = self.groups is not None and grouped(session.trajectory) is not None
        recent = self.book.counted(feedback.user, rating.time - CAP_S, rating.seq)
        if rules.user_cap and recent >= rules.user_cap and not group:
            return "capped", f"{recent} ratings of this user within {CAP_S:g} s"
        if feedback.user in self.purges.denied:
            return "opted_out", "its user is on the deny-list"
        if not feedback.training_allowed:
            return "opted_out", f"tenant {feedback.tenant} did not opt in when the session was rated"
        if feedback.untrainable:
            return "discarded", feedback.untrainable
        if rating.time - session.time > LATE_S:
            return "late", f"{rating.time - session.time:.0f} s after its session"
        if self.branch.base is not None and self.branch.oldest_version(session.trajectory) is None:
            return "late", f"no version of {self.branch.name} sampled it"
        return None, ""

    async def _session(self, feedback: UserFeedback) -> Rated | None:
        group = feedback.trajectory.rsplit("-", 2)[0]
        try:
            subject = subjects.TRAJ.at(run=self.run, group=group)
        except ValueError:  # a record may have any text, but a trajectory's group is always a valid subject
            return None
        last = await self.bus.last("HR_TRAJ", subject)
        if last is None or not isinstance(last.message, Trajectory) or last.message.id != feedback.trajectory:
            return None
        return Rated(last.message, last.time, link(last))

    async def _settle(self, rating: Rating, fate: Fate, detail: str = "", group: str = "") -> None:
        """Write a rating's end, once. A group that was issued for it and is not closed is dropped."""
        if rating.fate:
            return
        feedback = rating.feedback
        assert feedback is not None
        if fate != "closed":
            await self.branch.give_up(feedback.trajectory.rsplit("-", 2)[0], fate)
        record = FeedbackSettled(
            run=self.run,
            feedback_seq=rating.seq,
            fate=fate,
            detail=detail,
            branch=self._trained_by if group else "",
            group=group,
        )
        subject = subjects.FATE.at(run=self.run, user=feedback.user)
        await self.bus.publish(subject, record, msg_id=f"{self.run}.fate.{rating.seq}.{fate}")
        self.book.apply(record, 0)

    @property
    def _trained_by(self) -> str:
        """The run that trains on sessions."""
        return self.branch.name if self.groups is None else self.run

    # Batches

    async def _work(self, after: int) -> None:
        """Settle the recovered ratings, then make batches and candidates. after: sequence of the last rating that was
        read."""
        async with self._one_at_a_time:
            await self._adopt()
            for rating in [*self.book.waiting.values()]:
                await self._examine(rating)
        self._acting.append(self._act(self._follow_ratings(after), "ratings"))
        while True:
            async with self._one_at_a_time:
                await self._make_batches()
                await self._make_groups()
                await self._next_candidate()
            await self.news(self._news)

    async def _adopt(self) -> None:
        """Settle the ratings whose GroupClosed was written before a crash and whose FeedbackSettled was not."""
        for rating in [*self.book.waiting.values()]:
            feedback = rating.feedback
            assert feedback is not None
            group = self.branch.state.groups.get(feedback.trajectory.rsplit("-", 2)[0])
            if group is not None and group.closings and feedback.trajectory not in self._newest:
                await self._settle(rating, "closed", group=group.name)
                self._newest[feedback.trajectory] = rating

    def serving(self) -> int | None:
        """The promoted version's number in the branch; None if it is not a version of the branch."""
        return self.branch.version_of(self.promoted.policy) if self.promoted is not None else None

    async def _make_batches(self) -> None:
        """Close complete batches while there are enough ratings that may be trained on."""
        rules = self.config.feedback
        while rules.enabled and self.branch.base is not None:
            batch, begun = divmod(self.branch.places, rules.batch)
            if not begun and len(self.book.waiting) < rules.batch:
                return
            serving = self.serving()
            if serving is None or batch - serving > rules.staleness:
                await self._report_stalled(batch)
                return
            chosen = await self._choose(rules.batch - begun, batch)
            if len(chosen) < rules.batch - begun:
                return
            for rating, session in chosen:
                group = await self.branch.place(rating, session, self.replays.baseline(session.trajectory))
                await self._settle(rating, "closed", group=group)
            await self.event("batch_closed", f"batch {batch} of {self.branch.name}", batch=batch, ratings=rules.batch)

    async def _make_groups(self) -> None:
        """Offer the groups of clients' sessions that are complete, and fill those that the curriculum issued."""
        if self.groups is None:
            return
        allowed = await self._consent.tenants()
        for rating in [*self.book.waiting.values()]:
            feedback = rating.feedback
            assert feedback is not None
            if feedback.tenant not in allowed or feedback.user in self.purges.denied:
                await self._settle(rating, "opted_out", "its tenant has opted out since, or its user was purged")
        await self.groups.offer(self.book.waiting.values())
        wanted = {tree: attempt for attempt, tree in self.groups.wanted()}
        trees: dict[str, list[Rating]] = {tree: [] for tree in wanted}
        for rating in self.book.ratings.values():
            tree = tree_of(rating)
            if tree in trees and rating.fate in ("", "closed") and rating.group in ("", wanted[tree].issued.group):
                trees[tree].append(rating)
        for tree, attempt in wanted.items():
            await self._fill(attempt, tree, trees[tree])

    async def _fill(self, attempt: Attempt, tree: str, ratings: list[Rating]) -> None:
        """Give an issued attempt its Trajectory and its Score, or end it where its session is gone."""
        assert self.groups is not None
        parts = []
        for rating in ratings:
            if rating.feedback is not None and (session := await self._session(rating.feedback)) is not None:
                parts.append((rating, session))
        parts.sort(key=lambda part: part[1].trajectory.group)  # the first session's name begins the others'
        if not parts or parts[0][1].trajectory.group != tree:
            await self.groups.give_up(attempt)
            return
        for rating, _ in parts:
            await self._settle(rating, "closed", group=attempt.issued.group)
        await self.groups.fill(attempt, parts)

    async def _choose(self, count: int, batch: int) -> list[tuple[Rating, Rated]]:
        """Up to `count` of the oldest ratings that may be trained on in a batch. Ratings that may not are settled
        here."""
        allowed, now = await self._consent.tenants(), time.time()
        chosen: list[tuple[Rating, Rated]] = []
        for rating in [*self.book.waiting.values()]:
            feedback = rating.feedback
            assert feedback is not None
            if len(chosen) == count:
                break
            if not feedback.final and now - rating.time < self.config.feedback.settle_s:
                continue
            session = await self._session(feedback)
            oldest = self.branch.oldest_version(session.trajectory) if session is not None else None
            if session is None:
                await self._settle(rating, "unattributed", f"{feedback.trajectory} is not in HR_TRAJ any more")
            elif feedback.tenant not in allowed:
                await self._settle(rating, "opted_out", f"tenant {feedback.tenant} has opted out since")
            elif feedback.user in self.purges.denied:
                await self._settle(rating, "opted_out", "its user is on the deny-list")
            elif oldest is None or batch - oldest > self.config.feedback.staleness:
                await self._settle(rating, "late", f"sampled by version {oldest}, the batch is {batch}")
            elif await self.replays.ready(session.trajectory):
                chosen.append((rating, session))
        return chosen

    async def _report_stalled(self, batch: int) -> None:
        if self._stalled != batch and not self.gate.running:
            self._stalled = batch
            text = (
                f"batch {batch} of {self.branch.name} waits: the promoted version is too old for it. Promote a newer "
                f"version of the branch, or begin another branch ([feedback] branch)"
            )
            await self.event("feedback_stalled", text, "warning", batch=batch)

    # Candidates

    async def _next_candidate(self) -> None:
        """Begin the gate for the newest version of the branch if there is no candidate."""
        if self.gate.running or self.promoted is None:
            return
        serving = self.serving()
        newer = [version for version in self._heads if serving is not None and version > serving]
        newest = max(newer, default=-1)
        if newest < 0 or newest in self._judged:
            return
        self._judged.add(newest)
        same_weights = self._heads[newest].state_hash == self._hash_of(serving)  # after failed steps
        judged_before = self.gate.state.candidate == PolicyRef("pinned", newest, run=self.branch.name)
        if not same_weights and not judged_before:
            seen = max(self.book.ratings, default=0)
            await self.gate.begin(PolicyRef("pinned", newest, run=self.branch.name), seen)

    def _hash_of(self, version: int | None) -> str:
        head = self._heads.get(version) if version is not None else None
        return head.state_hash if head is not None else ""

    async def _follow_branch(self) -> None:
        where = subjects.STEP.at(run=self.branch.name)
        async for received in self.bus.follow("HR_STEP", where, start=self.branch.step_seq + 1):
            self.branch.state.apply(received.message, received.seq)
            self._news.set()

    async def _follow_versions(self) -> None:
        where = subjects.WEIGHT_HEAD.at(run=self.branch.name)
        async for received in self.bus.follow("HR_WEIGHTS", where):
            if isinstance(received.message, WeightHead):
                self._heads[received.message.version] = received.message
                self._news.set()

    async def _follow_results(self) -> None:
        where = subjects.EVENT.where(run=self.run, actor="evaluator", type="eval_result")
        async for received in self.bus.follow("HR_EVENT", where):
            if isinstance(received.message, EvalResult):
                async with self._one_at_a_time:
                    self.replays.on_result(received.message)
                    await self.gate.on_result(received.message)
                self._news.set()

    async def _on_shadow(self, received: Received[ShadowTurn]) -> None:
        async with self._one_at_a_time:
            await self.gate.on_shadow(received.message)
        self._news.set()

    async def _on_promotion(self, received: Received[Promotion]) -> None:
        """Promote the version that an operator names, if it was published; otherwise publish an event."""
        promotion = received.message
        newest = await self._newest_version(promotion.branch or self.run)
        if promotion.branch not in ("", self.branch.name) or not 0 <= promotion.version <= newest:
            text = f"expected a published version from 0 to {newest}, got {promotion.version}"
            if promotion.branch not in ("", self.branch.name):
                text = f"expected the branch {self.branch.name}, got {promotion.branch}"
            await self.event("promotion_refused", text, "warning", version=promotion.version)
            return
        if not promotion.eval_id and self.promoted is not None:  # keep the rate that was measured last
            promotion = msgspec.structs.replace(promotion, rate=self.promoted.rate)
        async with self._one_at_a_time:
            is_candidate = self.gate.running and self.gate.state.candidate == promotion.policy
            await self.gate.decide(promotion, "promoted" if is_candidate else "rolled_back")
            if self.config.feedback.enabled and await self.branch.open(promotion):
                text = f"{self.branch.name} begins at version {promotion.version}"
                await self.event("branch_opened", text, branch=self.branch.name, version=promotion.version)
        text = f"version {promotion.version}{f' of {promotion.branch}' if promotion.branch else ''}: {promotion.reason}"
        await self.event("promoted", text, version=promotion.version, rate=promotion.rate)
        self._news.set()

    async def _newest_version(self, run: str) -> int:
        """The newest committed version of a run, -1 before the first."""
        head = await self.bus.last("HR_WEIGHTS", subjects.WEIGHT_HEAD.at(run=run))
        return head.message.version if head is not None and isinstance(head.message, WeightHead) else -1

    # Time and figures

    async def _tick(self) -> None:
        async with self._one_at_a_time:
            await self.gate.on_time()
        self._news.set()

    async def _measure(self) -> None:
        trained = self.branch.state if self.groups is None else self.groups.state
        ends = self.book.ends({self._trained_by: trained})
        self.status = f"{len(self.book.ratings)} ratings, {ends['trained']} trained; gate: {self.gate.state.stage}"
        await self.metric(received=len(self.book.ratings), **{end: ends[end] for end in ENDS})
