"""Groups of clients' sessions, in a run that trains on them itself ([tasks] suite = "client").

A loop outside opens `[curriculum] group_size` sessions of one user with the same `task` and `group`, and rewards each.
Then the group is complete: this actor offers it (ClientGroup), and the curriculum issues it like any other group, as
soon as there is credit. For each issued slot this actor writes the attempt's Trajectory and its Score. The Trajectory
holds the whole tree of the session: each branch is a segment, and what a branch shares with the line it left is in its
prompt, so it is trained once.

A group that cannot be filled, because its user was purged or opted out since, gets SlotFailed records instead.
"""

import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec

from headrace.actors.feedback.branch import JUDGE, Rated, score_of
from headrace.bus.connection import Bus
from headrace.bus.nats.received import Received
from headrace.config import Config
from headrace.ledger.feedback import Rating
from headrace.ledger.state import Attempt, RunState
from headrace.messages.base import Message
from headrace.messages.product import CLIENT_SUITE, ClientGroup
from headrace.messages.rollout import SlotFailed, Trajectory, Turn
from headrace.messages.subjects import CLOSE, EVENT, FAIL, LEDGER, SCORE, STEP, TRAJ
from headrace.messages.tasks import TaskRef


def tree_of(rating: Rating) -> str:
    """The first session of a rated session's tree; empty for a rating whose record is gone."""
    return rating.feedback.trajectory.partition("-")[0] if rating.feedback is not None else ""


class ClientGroups:
    """The groups of one run, from its streams, and the writes to them."""

    def __init__(self, bus: Bus, config: Config, run: str, publish_event: Callable[..., Awaitable[object]]) -> None:
        self._bus, self._run, self._publish_event = bus, run, publish_event
        self._size = config.curriculum.group_size
        self.state = RunState(run)
        self._offers: dict[str, ClientGroup] = {}
        self._placed: set[str] = set()
        """Trees that an offered group has."""
        self._named: dict[int, tuple[str, str]] = {}
        """Rating of a tree's first session, by sequence, to the task and group that the client named."""
        where = {"run": run, "group": "*.*"}
        self.streams = {
            "HR_LEDGER": (LEDGER.where(**where), FAIL.where(**where)),
            "HR_SCORE": (SCORE.where(judge=JUDGE, **where), CLOSE.where(**where)),
            "HR_STEP": (STEP.at(run=run),),
            "HR_EVENT": (EVENT.where(run=run, actor="feedback", type=ClientGroup.type_name),),
        }

    def apply(self, received: Received[Message]) -> bool:
        """Apply a record of `streams`; True when it changed the state."""
        message = received.message
        if isinstance(message, ClientGroup):
            if message.group in self._offers:
                return False
            self._offers[message.group] = message
            self._placed.update(message.sessions)
            return True
        return getattr(message, "lane", "train") == "train" and self.state.apply(message, received.seq)

    def note(self, rating: Rating, session: Trajectory) -> None:
        """Remember the group of a rating that may be trained on."""
        if (labels := grouped(session)) is not None and session.group == tree_of(rating):
            self._named[rating.seq] = labels

    async def offer(self, waiting: Iterable[Rating]) -> None:
        """Offer the groups that these ratings complete, oldest first."""
        groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for rating in waiting:
            tree, feedback, labels = tree_of(rating), rating.feedback, self._named.get(rating.seq)
            if labels is None or feedback is None or tree in self._placed:
                continue
            key = (feedback.tenant, feedback.user, *labels)
            groups[key].append(tree)
            if len(groups[key]) == self._size:
                trees = tuple(groups.pop(key))
                name = hashlib.sha256("\0".join(trees).encode()).hexdigest()[:12]
                offer = ClientGroup(
                    run=self._run,
                    group=f"{feedback.user}.g{name}",
                    task=TaskRef(CLIENT_SUITE, labels[0]),
                    sessions=trees,
                )
                await self._publish_event(offer, msg_id=f"{self._run}.{offer.group}.offered")
                self._offers[offer.group] = offer
                self._placed.update(trees)

    def wanted(self) -> Iterator[tuple[Attempt, str]]:
        """The issued attempts that have no end, each with the tree of its session."""
        for group in self.state.open.values():
            sessions = self._offers[group.name].sessions if group.name in self._offers else ()
            for slot, attempt in group.attempts():
                if attempt.score is None and not attempt.failed:
                    yield attempt, sessions[slot] if slot < len(sessions) else ""

    async def fill(self, attempt: Attempt, parts: Sequence[tuple[Rating, Rated]]) -> None:
        """Write the Trajectory and the Score of an attempt. parts: ratings and sessions of its tree, the first session
        first."""
        issued, (first, root) = attempt.issued, parts[0]
        assert first.feedback is not None
        made = msgspec.structs.replace(
            root.trajectory,
            lane="train",
            group=issued.group,
            slot=issued.slot,
            attempt=issued.attempt,
            id=f"{issued.group}-{issued.slot}-{issued.attempt}",
            task=issued.task,
            turns=tuple(_one_after_another(session.trajectory for _, session in parts)),
        )
        seq = await self._copy(made)
        score = score_of(first.feedback, made, seq)
        subject = SCORE.at(run=self._run, judge=JUDGE, group=issued.group)
        self.state.apply(score, await self._bus.publish(subject, score, msg_id=f"{self._run}.{made.id}.score"))

    async def _copy(self, made: Trajectory) -> int:
        """Store an attempt's Trajectory, once. Its sequence."""
        subject = TRAJ.at(run=self._run, group=made.group)
        async for received in self._bus.history("HR_TRAJ", subject):
            if isinstance(received.message, Trajectory) and received.message.id == made.id:
                return received.seq
        return await self._bus.publish(subject, made, msg_id=f"{self._run}.{made.id}")

    async def give_up(self, attempt: Attempt) -> None:
        """End an attempt whose session may not be trained on any more."""
        issued = attempt.issued
        failed = SlotFailed(
            run=self._run,
            lane="train",
            group=issued.group,
            slot=issued.slot,
            attempt=issued.attempt,
            reason="no_verdict",
            detail="its session was purged, or may not be trained on any more",
        )
        id = f"{self._run}.{issued.group}-{issued.slot}-{issued.attempt}.failed"
        self.state.apply(failed, await self._bus.publish(FAIL.at(run=self._run, group=issued.group), failed, msg_id=id))


def grouped(trajectory: Trajectory) -> tuple[str, str] | None:
    """The task and the group that a client named for a session; None without a group."""
    labels = trajectory.capture.labels if trajectory.capture is not None else {}
    return (labels.get("task", ""), labels["group"]) if labels.get("group") else None


def _one_after_another(conversations: Iterable[Trajectory]) -> Iterator[Turn]:
    """The turns of several conversations as the segments of one attempt."""
    lines = ((segment, turn) for segment, each in enumerate(conversations) for turn in each.turns)
    for index, (segment, turn) in enumerate(lines):
        yield msgspec.structs.replace(turn, index=index, segment=segment)
