"""`headrace staleness`: show a run's staleness bound, or change it while the run is active.

The operator publishes a request as an event. The curriculum answers with a record in the stream of closings, where
trainer and audit read the bound. The command waits for that record, so the bound that it prints is in force.
"""

import argparse
import asyncio
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands

ANSWER_S = 15.0


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("staleness", help="show a run's staleness bound, or change it while the run is active")
    add_run(parser, optional=False)
    parser.add_argument("bound", nargs="?", type=int, help="largest age of a token, in versions; default: show it")
    parser.set_defaults(handler=staleness)


def staleness(args: argparse.Namespace) -> int:
    """Show the bounds, or request another one."""
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder) as bus:
            if args.bound is None:
                return await show(bus, folder.id)
            return await change(bus, folder.id, args.bound)

    return looped(body())


async def show(bus: "Bus", run: str) -> int:
    """Print the bounds that the run has had, one per line."""
    from headrace.messages.ledger import StalenessBound
    from headrace.messages.subjects import CLOSE

    any_bound = False
    async for received in bus.history("HR_SCORE", CLOSE.where(run=run)):
        if isinstance(received.message, StalenessBound):
            say(f"from batch {received.message.first_batch}: {received.message.bound}")
            any_bound = True
    if not any_bound:
        raise RunError(f"run {run} has not published a staleness bound yet")
    return 0


async def change(bus: "Bus", run: str, bound: int) -> int:
    """Request another bound and wait until it is in force. RunError when it is refused or not answered."""
    from headrace.algorithms.staleness import Bounds
    from headrace.messages.ledger import BoundAsked, StalenessBound
    from headrace.messages.subjects import CLOSE, EVENT

    if bound < 0:
        raise RunError(f"expected a staleness bound >= 0, got {bound}", 2)
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
            f"the curriculum of run {run} did not answer within {ANSWER_S:.0f} s. The request stays in the stream and "
            f"a curriculum that starts later handles it; `headrace staleness {run}` shows the bound in force",
            1,
        ) from None
    assert bounds is not None
    first = bounds.changes[-1][0]
    full = next(batch for batch in range(first, first + bound + 1) if bounds.at(batch) == bound)
    say(f"staleness bound {bound} from batch {full} on{f', growing from batch {first}' if full > first else ''}")
    return 0
