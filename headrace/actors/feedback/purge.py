"""Deletes a user's data, and writes the record that keeps the ledger of feedback balanced."""

from headrace.actors.feedback.branch import BranchLedger
from headrace.bus.connection import Bus
from headrace.ledger.feedback import FeedbackBook
from headrace.messages.product import FeedbackPurged, PurgedFeedback
from headrace.messages.subjects import FATE
from headrace.messages.training import StepDone

PURGED = "purged"
"""Takes a user's place in the subject of purge records, so that a purge does not delete them."""


async def purge_user(
    bus: Bus, run: str, book: FeedbackBook, branch: BranchLedger, user: str
) -> tuple[FeedbackPurged, int]:
    """Write a FeedbackPurged with the user's ratings, then delete everything under the user's hash. Returns the record
    and the number of deleted messages."""
    ratings = tuple(
        PurgedFeedback(rating.seq, rating.group if rating.fate == "closed" else "") for rating in book.of_user(user)
    )
    record = FeedbackPurged(
        run=run,
        user=user,
        ratings=ratings,
        branch=branch.name,
        last_version_before=_last_version_before(branch, ratings),
    )
    # A group that was issued and not closed would otherwise stay open.
    for group in [name for name in branch.state.open if name.startswith(f"{user}.")]:
        await branch.give_up(group, PURGED)
    seq = await bus.publish(FATE.at(run=run, user=PURGED), record)
    book.apply(record, seq, (await bus.get("HR_FEEDBACK", seq)).time)
    removed = 0
    for stream, filter in (
        ("HR_FEEDBACK", f"hr.feedback.*.{user}"),
        ("HR_FEEDBACK", f"hr.fate.*.{user}"),
        ("HR_TRAJ", f"hr.traj.*.{user}.*"),
        ("HR_TURN", f"hr.turn.*.{user}.*"),
        ("HR_SCORE", f"hr.score.*.*.{user}.*"),
        ("HR_BLOB", f"hr.blob.{user}.>"),
    ):
        removed += await bus.purge(stream, subject=filter)
    return record, removed


def absorbed(record: FeedbackPurged) -> str:
    """A text about the versions that were trained on purged ratings; empty if there are none."""
    if record.last_version_before < 0:
        return ""
    return (
        f"; versions of {record.branch} after {record.last_version_before} were trained on some of them and are not "
        "changed by the purge"
    )


def _last_version_before(branch: BranchLedger, ratings: tuple[PurgedFeedback, ...]) -> int:
    """The newest branch version that was trained on none of these ratings; -1 if no step used any of them."""
    groups = {rating.group for rating in ratings if rating.group}
    outcomes = branch.state.outcomes.values()
    trained = [outcome.step for outcome in outcomes if isinstance(outcome, StepDone) and groups & set(outcome.groups)]
    return min(trained, default=-1)
