"""The ledger of feedback from the streams of a run: every rating, and the branch that trains on some of them."""

from headrace.bus.connection import Bus
from headrace.ledger.feedback import FeedbackBook, FeedbackReport, examine
from headrace.ledger.state import RunState
from headrace.messages.product import FeedbackPurged
from headrace.messages.subjects import CLOSE, FATE, FEEDBACK, LEDGER, STEP


async def read_book(bus: Bus, run: str) -> FeedbackBook:
    """Every rating of a run with its end."""
    book = FeedbackBook(run)
    async for received in bus.history("HR_FEEDBACK", FEEDBACK.where(), FATE.where(run=run)):
        book.apply(received.message, received.seq, received.time)
    return book


async def purged_users(bus: Bus, run: str) -> frozenset[str]:
    """Hashes of the users whose records were deleted."""
    records = bus.history("HR_FEEDBACK", FATE.where(run=run))
    return frozenset(
        [received.message.user async for received in records if isinstance(received.message, FeedbackPurged)]
    )


async def feedback_books(bus: Bus, run: str) -> tuple[FeedbackReport | None, list[str], list[str]]:
    """The report (None without ratings), the branches, and a sentence for every fault.

    The run may go on meanwhile. Ratings are read before the branch, so that the branch contains each closed rating, and
    again after it, so that each slot of the branch has its rating.
    """
    book = await read_book(bus, run)
    if not book.ratings:
        return None, [], []
    names = sorted({rating.branch for rating in book.ratings.values() if rating.branch})
    branches = {name: await _branch(bus, name) for name in names}
    report, wrong = examine(book, branches, await read_book(bus, run))
    return report, [name for name in names if name != run], wrong


async def _branch(bus: Bus, run: str) -> RunState:
    """Ledger, closings and steps of a branch."""
    state = RunState(run)
    filters = (("HR_LEDGER", LEDGER.where(run=run)), ("HR_SCORE", CLOSE.where(run=run)), ("HR_STEP", STEP.at(run=run)))
    for stream, filter in filters:
        async for received in bus.history(stream, filter):
            state.apply(received.message, received.seq)
    return state
