"""The ledger of feedback: 10,000 ratings, a tenth of them doubled or late, each in exactly one place."""

import random

import msgspec

from headrace.ledger.feedback import ENDS, FeedbackBook, examine
from headrace.ledger.state import RunState
from headrace.messages.ledger import ClosedSlot, GroupClosed, SlotIssued
from headrace.messages.product import Feedback, FeedbackPurged, FeedbackSettled, PurgedFeedback
from headrace.messages.tasks import TaskRef
from headrace.messages.training import LeftOut, StepDone
from tests.support.records import of

RUN, BRANCH = "r", "r-feedback"
TASK = TaskRef("client", "t")


def rating(number: int, user: str) -> Feedback:
    return Feedback(tenant="t", user=user, run=RUN, trajectory=f"{user}.{number:012x}-0-0", thumb="up")


def settled(seq: int, fate: str, group: str = "") -> FeedbackSettled:
    branch = BRANCH if group else ""
    return FeedbackSettled(run=RUN, feedback_seq=seq, fate=fate, branch=branch, group=group)  # type: ignore[arg-type]


def place(branch: RunState, group: str, seq: int) -> None:
    """SlotIssued and GroupClosed, as the feedback actor writes them."""
    branch.apply(
        of(SlotIssued, run=BRANCH, group=group, group_size=1, task=TASK),
        seq,
    )  # fmt: skip
    slot = ClosedSlot(slot=0, attempt=0, trajectory_seq=seq, score_seq=seq, reward=1.0, oldest_version=0)
    closed = GroupClosed(run=BRANCH, group=group, task=TASK, group_size=1, slots=(slot,), oldest_version=0)
    branch.apply(closed, seq)


def step(branch: RunState, number: int, groups: tuple[str, ...], left_out: tuple[LeftOut, ...] = ()) -> None:
    done = of(StepDone, run=BRANCH, step=number, groups=groups, version=number + 1, left_out=left_out)
    branch.apply(done, 0)


def test_a_rating_that_its_step_left_out_is_discarded() -> None:
    book, branch = FeedbackBook(RUN), RunState(BRANCH)
    groups = []
    for seq in (1, 2):
        message = rating(seq, f"u{seq}")
        book.apply(message, seq, float(seq))
        groups.append(message.trajectory.removesuffix("-0-0"))
        place(branch, groups[-1], seq)
        book.apply(settled(seq, "closed", groups[-1]), 0)
    step(branch, 0, tuple(groups), (LeftOut(trajectory_seq=2, reason="bad_record", detail="d"),))
    report, wrong = examine(book, {BRANCH: branch}, book)
    assert wrong == [] and report.balanced
    assert (report.ends["trained"], report.ends["discarded"], report.received) == (1, 1, 2)


def test_ten_thousand_ratings_balance_at_every_moment() -> None:
    rng, book, branch = random.Random(1), FeedbackBook(RUN), RunState(BRANCH)
    fates = ("late", "capped", "opted_out", "unattributed", "superseded", "discarded")
    groups: list[str] = []
    for seq in range(1, 10_001):
        message = rating(seq, f"u{rng.randrange(200)}")
        book.apply(message, seq, float(seq))
        if rng.random() < 0.1:
            assert not book.apply(message, seq, float(seq)), "a record that is read twice counts once"
        if rng.random() < 0.3:
            book.apply(settled(seq, rng.choice(fates)), 0)
        elif rng.random() < 0.8:
            group = message.trajectory.removesuffix("-0-0")
            place(branch, group, seq)
            book.apply(settled(seq, "closed", group), 0)
            groups.append(group)
        if len(groups) == 50:
            step(branch, branch.steps, tuple(groups))
            groups = []
        if seq % 1000 == 0:
            report, wrong = examine(book, {BRANCH: branch}, book)
            assert wrong == [] and report.balanced
            assert report.received == seq == sum(report.ends[end] for end in ENDS)
    trained = sum(len(outcome.groups) for outcome in branch.outcomes.values())
    assert report.ends["trained"] == trained > 5000 and report.ends["pending"] > 0


def test_a_purge_keeps_the_counts_without_the_records() -> None:
    book, branch = FeedbackBook(RUN), RunState(BRANCH)
    for seq in (1, 2, 3):
        book.apply(rating(seq, "gone"), seq, 1.0)
    place(branch, "gone.000000000001", 1)
    book.apply(settled(1, "closed", "gone.000000000001"), 0)
    step(branch, 0, ("gone.000000000001",))
    purge = FeedbackPurged(
        run=RUN,
        user="gone",
        branch=BRANCH,
        ratings=(PurgedFeedback(1, "gone.000000000001"), PurgedFeedback(2), PurgedFeedback(3)),
    )
    before = msgspec.structs.replace(purge)
    book.apply(purge, 9, 5.0)
    after = FeedbackBook(RUN)  # the records are deleted, the purge is not
    after.apply(before, 9, 5.0)
    for each in (book, after):
        report, wrong = examine(each, {BRANCH: branch}, each)
        assert wrong == [] and (report.ends["trained"], report.ends["purged"]) == (1, 2)


def test_what_does_not_add_up_is_named() -> None:
    book, branch = FeedbackBook(RUN), RunState(BRANCH)
    book.apply(rating(1, "a"), 1, 1.0)
    book.apply(settled(1, "late"), 0)
    book.apply(settled(1, "capped"), 0)
    book.apply(settled(2, "late"), 0)
    book.apply(rating(3, "a"), 3, 1.0)
    book.apply(settled(3, "closed", "a.000000000003"), 0)
    place(branch, "a.000000000007", 5)
    _, wrong = examine(book, {BRANCH: branch}, book)
    for text in ("rating 1 ended twice", "[2] are gone", "which is not closed", "the group a.000000000007 of"):
        assert any(text in fault for fault in wrong), text
