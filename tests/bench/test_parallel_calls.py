"""The transcript of a turn with eight calls does not depend on the order in which they end."""

import asyncio
import itertools
import random

import pytest

from benchmarks.parallel_calls import CALLS, FILES, Turns, Waiting, transcript
from headrace.messages.sandbox import Sandbox
from headrace.tasks.local import LocalFiles

pytestmark = pytest.mark.anyio


async def test_eight_calls_wait_together_and_their_transcript_has_one_hash() -> None:
    turns, draws = Turns(), random.Random(0)
    hashes, orders = set(), set()
    for _ in range(100):
        gates = [asyncio.Event() for _ in range(CALLS)]
        order = draws.sample(range(CALLS), CALLS)
        numbers = itertools.count()

        async def wait(
            inner: Sandbox,
            call_id: str,
            gates: list[asyncio.Event] = gates,
            order: list[int] = order,
            numbers: "itertools.count[int]" = numbers,
        ) -> None:
            """A call ends only after all have begun, and after those before it in a drawn order."""
            number = next(numbers)
            if number == CALLS - 1:
                gates[0].set()
            place = order.index(number)
            async with asyncio.timeout(60):  # calls that do not run together would wait for ever
                await gates[place].wait()
            if place + 1 < CALLS:
                gates[place + 1].set()

        sandbox = Waiting(LocalFiles(FILES), wait)
        episode, _ = await turns.run(sandbox, CALLS)
        assert [result.output for result in episode.turns[0].results] == [f"1:value = {n}" for n in range(CALLS)]
        hashes.add(transcript(episode))
        orders.add(tuple(sandbox.ended))
    assert len(hashes) == 1 and len(orders) > 90
