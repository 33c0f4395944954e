"""`headrace staleness`: look at a run's staleness bound, and change it while the run goes on.

The operator only asks, with an event. The curriculum answers with a record among the closings, which is where trainer
and audit read the bound; this command waits for that record, so what it prints is in force.
"""

import asyncio
from typing import TYPE_CHECKING

from headrace.algorithms.staleness import Bounds
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus

ANSWER_S = 15.0


async def show(bus: "Bus", run: str) -> int:
    """The bounds that the run has had, one a line."""
    from headrace.messages.ledger import StalenessBound
    from headrace.messages.subjects import CLOSE

    found = False
    async for received in bus.history("HR_SCORE", CLOSE.where(run=run)):
        if isinstance(received.message, StalenessBound):
            say(f"from batch {received.message.first_batch}: {received.message.bound}")
            found = True
    if not found:
        raise RunError(f"run {run} has not said a staleness bound yet")
    return 0


async def change(bus: "Bus", run: str, bound: int) -> int:
    """Ask for another bound and wait for the answer. RunError when it is refused or nobody answers."""
    from headrace.messages.ledger import BoundAsked, StalenessBound
    from headrace.messages.subjects import CLOSE, EVENT

    if bound < 0:
        raise RunError(f"a staleness bound is 0 or more, not {bound}", 2)
    where = EVENT.at(run=run, actor="operator", type=BoundAsked.type_name)
    asked = await bus.publish(where, BoundAsked(run=run, bound=bound))
    bounds: Bounds | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            async for received in bus.follow("HR_SCORE", CLOSE.where(run=run)):
                record = received.message
                if not isinstance(record, StalenessBound):
                    continue
                bounds = bounds.changed(record.first_batch, record.bound) if bounds else Bounds.constant(record.bound)
                if record.asked_seq >= asked:
                    break
    except TimeoutError:
        raise RunError(
            f"no curriculum of run {run} has answered within {ANSWER_S:.0f} s; the wish stands and takes effect when "
            f"one is there, unless it is refused: headrace staleness {run} shows what holds",
            1,
        ) from None
    assert bounds is not None
    first = bounds.changes[-1][0]
    full = next(batch for batch in range(first, first + bound + 1) if bounds.at(batch) == bound)
    say(f"staleness bound {bound} from batch {full} on{f', growing from batch {first}' if full > first else ''}")
    return 0
