"""The time that a checker has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace import registry
from headrace.judging.checkers import TIMEOUT_S, Message, check, waits_for
from headrace.messages.tasks import Grading, Oracle, TaskRef, TestPlan

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def late(message: Message) -> AsyncIterator[None]:
    """Takes twice the checker's time limit, by the clock of the event loop."""
    loop = asyncio.get_running_loop()
    time, loop.time = loop.time, lambda: time() + 2 * TIMEOUT_S  # type: ignore[method-assign]
    for _ in range(3):  # a time limit that had begun before would end now
        await asyncio.sleep(0)
    yield


@waits_for(late)
def slow_to_start(message: Message) -> float:
    return float(message.text)


async def test_the_start_of_a_checkers_process_does_not_count() -> None:
    registry.admit("checkers", [f"{__name__}:slow_to_start"])
    grading = Grading(kind="checker", checker=f"{__name__}:slow_to_start")
    plan = TestPlan(kind="command", argv=("true",))
    oracle = Oracle(ref=TaskRef("toy", "1"), hidden={}, tests=plan, expected=(), solution={}, grading=grading)
    assert await check(oracle, "", "0.5") == 0.5
