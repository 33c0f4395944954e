"""The ledger of feedback: every rating from its record to its end, as a fold over the streams.

Conservation: received = trained + late + capped + opted out + unattributed + superseded + purged + discarded + pending,
at every moment. A rating ends with a FeedbackSettled, with its user's purge, or with the step of the batch in which the
branch trains on it. The feedback actor decides from this ledger and the audit verifies it; both use this module.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from headrace.ledger.state import RunState
from headrace.messages.base import Message
from headrace.messages.product import Feedback, FeedbackPurged, FeedbackSettled, Signal
from headrace.messages.training import StepDone

ENDS = ("trained", "late", "capped", "opted_out", "unattributed", "superseded", "purged", "discarded", "pending")
"""The ends of ratings; every rating is counted under exactly one of them."""

RANK: dict[Signal, int] = {
    "followup": 0,
    "cancel": 0,
    "diff": 1,
    "undo": 1,
    "persistence": 1,
    "reward": 1,
    "thumb": 2,
}
"""Ranks of signals. Of two ratings of a session the one with the higher rank counts; of equal ranks, the later one. A
provisional one has the lowest rank."""


def rank(feedback: Feedback) -> int:
    """The rank of a rating."""
    return RANK[feedback.signal] if feedback.final else 0


def outranks(earlier: Feedback | None, later: Feedback) -> bool:
    """Whether an earlier rating of a session stays in force although a later one came."""
    return earlier is not None and rank(earlier) > rank(later)


@dataclass(slots=True)
class Rating:
    """A rating whose record is in the stream, or was there until its user's ratings were purged."""

    seq: int
    feedback: Feedback | None
    """None when its record is deleted."""
    time: float
    """Seconds since the epoch at which its record was stored; 0 for a deleted record."""
    fate: str = ""
    """Empty while it waits for a batch; ``closed`` once it has a place in a batch; otherwise one of `ENDS`."""
    detail: str = ""
    """Why it ended so."""
    branch: str = ""
    group: str = ""
    purged: bool = False


def gated(earlier: Rating | None, feedback: Feedback) -> bool:
    """Whether the gate counts a rating: one per session, and no provisional one.

    earlier: the rating of the session that was in force before."""
    before = earlier.feedback if earlier is not None else None
    return rank(feedback) > 0 and (before is None or rank(before) == 0)


class FeedbackReport(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of a run's feedback."""

    balanced: bool
    received: int
    ends: dict[str, int]
    """`ENDS` to number of ratings."""


class FeedbackBook:
    """All ratings of one run. `apply` is idempotent."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.ratings: dict[int, Rating] = {}
        """By sequence in HR_FEEDBACK."""
        self.waiting: dict[int, Rating] = {}
        """Ratings that have not ended and have no place in a batch, oldest first."""
        self.by_user: dict[str, list[Rating]] = {}
        self.problems: list[str] = []

    def apply(self, message: Message, seq: int, time: float = 0.0) -> bool:
        """Apply a record of HR_FEEDBACK; True when it changed the ledger."""
        match message:
            case Feedback() if message.run == self.run:
                return self._received(message, seq, time)
            case FeedbackSettled() if message.run == self.run:
                return self._settled(message)
            case FeedbackPurged() if message.run == self.run:
                return self._purged(message)
        return False

    def _received(self, feedback: Feedback, seq: int, time: float) -> bool:
        rating = self.ratings.get(seq)
        if rating is not None:
            if rating.feedback is None and not rating.purged:  # the FeedbackSettled was read before the Feedback
                rating.feedback, rating.time = feedback, time
                self.by_user.setdefault(feedback.user, []).append(rating)
            return False
        rating = self.ratings[seq] = self.waiting[seq] = Rating(seq, feedback, time)
        self.by_user.setdefault(feedback.user, []).append(rating)
        return True

    def _settled(self, record: FeedbackSettled) -> bool:
        rating = self.ratings.get(record.feedback_seq)
        if rating is None:
            rating = self.ratings[record.feedback_seq] = Rating(record.feedback_seq, None, 0.0)
        if rating.purged:
            return False
        if rating.fate:
            if (rating.fate, rating.group) != (record.fate, record.group):
                self.problems.append(f"rating {rating.seq} ended twice: {rating.fate} and {record.fate}")
            return False
        rating.fate, rating.branch, rating.group = record.fate, record.branch, record.group
        rating.detail = record.detail
        self.waiting.pop(rating.seq, None)
        return True

    def _purged(self, record: FeedbackPurged) -> bool:
        for entry in record.ratings:
            rating = self.ratings.setdefault(entry.seq, Rating(entry.seq, None, 0.0))
            rating.purged, rating.feedback = True, None
            rating.branch, rating.group = (record.branch if entry.group else ""), entry.group
            rating.fate = "closed" if entry.group else "purged"
            self.waiting.pop(entry.seq, None)
        return True

    def of_user(self, user: str) -> Iterator[Rating]:
        """The ratings of a user whose records are in the stream."""
        return (rating for rating in self.by_user.get(user, ()) if rating.feedback is not None)

    def newest(self, trajectory: str) -> Rating | None:
        """The newest rating of a session whose record is in the stream."""
        last: Rating | None = None
        for rating in self.of_user(trajectory.partition(".")[0]):
            if rating.feedback is not None and rating.feedback.trajectory == trajectory:
                last = rating if last is None or rating.seq > last.seq else last
        return last

    def counted(self, user: str, since: float, up_to: int) -> int:
        """Number of a user's ratings that wait or have a place in a batch, stored since `since` (seconds since the
        epoch) and before sequence `up_to`."""
        return sum(
            rating.fate in ("", "closed") and rating.time >= since and rating.seq < up_to
            for rating in self.of_user(user)
        )

    def end(self, rating: Rating, branches: Mapping[str, RunState]) -> str:
        """The entry of `ENDS` under which a rating is counted."""
        if rating.fate == "closed":
            branch = branches.get(rating.branch)
            group = branch.groups.get(rating.group) if branch is not None else None
            if group is not None and group.dropped is not None:
                return "purged" if rating.purged else "late" if group.dropped.reason == "stale" else "discarded"
            if branch is None or group is None or not group.steps:
                return "purged" if rating.purged else "pending"
            left_out = branch.left_out(group)
            trained = any(slot.trajectory_seq not in left_out for _, closed in group.closings for slot in closed.slots)
            if isinstance(branch.outcomes[group.steps[0]], StepDone) and trained:
                return "trained"
            return "purged" if rating.purged else "discarded"
        return rating.fate or "pending"

    def ends(self, branches: Mapping[str, RunState]) -> Counter[str]:
        """Number of ratings by their end. branches: run state of the branch runs that train on them, by run."""
        return Counter(self.end(rating, branches) for rating in self.ratings.values())

    def groups(self) -> set[tuple[str, str]]:
        """(branch, group) of every rating with a place in a batch; branch is empty for ratings that still waited
        here."""
        closed = {(rating.branch, rating.group) for rating in self.ratings.values() if rating.fate == "closed"}
        waiting = (rating.feedback for rating in self.waiting.values())
        return closed | {("", feedback.trajectory.rsplit("-", 2)[0]) for feedback in waiting if feedback is not None}


def examine(
    book: FeedbackBook, branches: Mapping[str, RunState], later: FeedbackBook
) -> tuple[FeedbackReport, list[str]]:
    """The report, and a text for every contradiction.

    branches: run state of the branch runs, by run, read after `book`. later: the same ledger as `book`, read after
    them.
    """
    wrong = [f"feedback: {problem}" for problem in book.problems]
    ends = book.ends(branches)
    unknown = set(ends) - set(ENDS)
    if unknown:
        wrong.append(f"feedback: ratings ended as {sorted(unknown)}; expected one of {', '.join(ENDS)}")
    closed = Counter((rating.branch, rating.group) for rating in book.ratings.values() if rating.fate == "closed")
    for (name, group), times in closed.items():
        of_clients = name == book.run  # there a group has a session in each slot, and each branch of a session a rating
        if times > 1 and not of_clients:
            wrong.append(f"feedback: {times} ratings name the group {group} of {name}; expected one")
        state_group = branches[name].groups.get(group)
        if state_group is None or not (state_group.closings or of_clients):
            wrong.append(f"feedback: a rating names the group {group} of {name}, which is not closed")
    named = later.groups()
    for name, branch in branches.items():
        for each in branch.groups.values():
            if each.closings and not named & {(name, each.name), ("", each.name)}:
                wrong.append(f"feedback: the group {each.name} of {name} is closed and no rating names it")
    received, ended = len(book.ratings), sum(ends[end] for end in ENDS)
    if received != ended:
        wrong.append(f"feedback: {received} ratings were received, {ended} are accounted for")
    lost = [rating.seq for rating in book.ratings.values() if rating.feedback is None and not rating.purged]
    if lost:
        wrong.append(f"feedback: the records of ratings {lost[:5]} are gone and no purge names them")
    return FeedbackReport(balanced=not wrong, received=received, ends={end: ends[end] for end in ENDS}), wrong
