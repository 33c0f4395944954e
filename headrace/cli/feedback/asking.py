"""Requests another promoted version from the feedback actor of a run, and waits for its answer."""

import asyncio
from typing import TYPE_CHECKING

from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.messages.product import Promotion

ANSWER_S = 30.0


async def promoted(bus: "Bus", run: str) -> list["Promotion"]:
    """The records of all promotions, in order."""
    from headrace.messages.product import Promotion
    from headrace.messages.subjects import EVENT

    where = EVENT.where(run=run, actor="feedback", type=Promotion.type_name)
    return [
        received.message async for received in bus.history("HR_EVENT", where) if isinstance(received.message, Promotion)
    ]


async def ask(bus: "Bus", promotion: "Promotion") -> None:
    """Request a promotion and wait until it is in force. RunError if it is refused or not answered."""
    from headrace.messages.operations import Event
    from headrace.messages.subjects import EVENT

    run = promotion.run
    after = await bus.last_seq("HR_EVENT")
    await bus.publish(EVENT.at(run=run, actor="operator", type=promotion.type_name), promotion)
    where = EVENT.where(run=run, actor="feedback", type=Event.type_name)
    try:
        async with asyncio.timeout(ANSWER_S):
            async for received in bus.follow("HR_EVENT", where, start=after + 1):
                event = received.message
                if isinstance(event, Event) and event.kind == "promotion_refused":
                    raise RunError(f"run {run} refused the promotion: {event.text}", 1)
                if isinstance(event, Event) and event.kind == "promoted":
                    return
    except TimeoutError:
        raise RunError(
            f"the feedback actor of run {run} did not answer within {ANSWER_S:.0f} s. The request stays in the stream, "
            "and a feedback actor that starts later handles it",
            1,
        ) from None
