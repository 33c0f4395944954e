"""Attempts run several at once: results come in the order of the candidates, and the search ends the other attempts."""

import asyncio
from contextlib import aclosing

import pytest

from headrace.tasks.packages.attempts import in_order

pytestmark = pytest.mark.anyio


async def test_results_come_in_the_order_of_the_candidates() -> None:
    ready = [asyncio.Event() for _ in range(4)]
    lanes: dict[int, int] = {}

    async def attempt(candidate: int, lane: int) -> int:
        lanes[candidate] = lane
        if candidate == 2:
            ready[0].set()  # only the third attempt lets the first one end, so the second ended before both
        if candidate != 1:
            await ready[candidate].wait()
        ready[2].set()
        return 10 * candidate

    seen = []
    async with aclosing(in_order(range(4), attempt, 2)) as results:
        async for candidate, result in results:
            seen.append((candidate, result))
            ready[3].set()
    assert seen == [(0, 0), (1, 10), (2, 20), (3, 30)]
    assert lanes[0] == 0 and lanes[1] == lanes[2] == 1, "an attempt takes the lane of one that ended"


async def test_the_other_attempts_end_with_the_search() -> None:
    cancelled: list[int] = []

    async def attempt(candidate: int, lane: int) -> int:
        try:
            if candidate:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(candidate)
            raise
        return candidate

    async with aclosing(in_order(range(9), attempt, 3)) as results:
        async for candidate, _ in results:
            assert candidate == 0
            break
    assert cancelled == [1, 2]


async def test_an_attempt_that_fails_ends_the_search() -> None:
    async def attempt(candidate: int, lane: int) -> int:
        if candidate == 1:
            raise ValueError("no capacity")
        return candidate

    seen = []
    with pytest.raises(ValueError, match="no capacity"):
        async with aclosing(in_order(range(5), attempt, 2)) as results:
            async for candidate, _ in results:
                seen.append(candidate)
    assert seen == [0]
