"""Running one actor inside a test, as its supervisor would."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from headrace.bus.connection import Bus
from headrace.bus.runtime.actor import Actor
from headrace.config import Config

A = TypeVar("A", bound=Actor)


@asynccontextmanager
async def living(cls: type[A], config: Config, bus: Bus, run: str, id: str = "") -> AsyncIterator[A]:
    """Started, and shut at the end. A failure of the actor ends the test at once."""
    actor = cls(config, bus, run, id or bus.id)
    try:
        async with asyncio.timeout(None) as alive:
            actor.failed.add_done_callback(lambda _: alive.reschedule(0))
            await actor.start()
            actor.started = True
            yield actor
    except TimeoutError:
        if not alive.expired():
            raise
    finally:
        await actor.shut(5.0)
    if actor.failed.done():
        raise actor.failed.result()
