"""Utilization counts work, and not the waiting inside it, on a clock that the test holds."""

import asyncio

import pytest

from headrace.bus.runtime.utilization import Utilization

pytestmark = pytest.mark.anyio


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_handlers_count_but_not_their_waiting() -> None:
    clock = Clock()
    busy = Utilization(clock)
    clock.now += 1
    with busy.working():
        clock.now += 2
        with busy.waiting():
            clock.now += 1
        clock.now += 1
    clock.now += 5
    assert busy.take() == pytest.approx(0.3)
    clock.now += 1
    assert busy.take() == 0.0


async def test_two_handlers_at_once_count_once() -> None:
    clock = Clock()
    busy = Utilization(clock)
    with busy.working():
        clock.now += 1
        with busy.working():
            clock.now += 1
            with busy.waiting():
                clock.now += 1
    assert busy.take() == 1.0


async def test_a_background_loop_counts_from_its_first_waiting_until_it_ends() -> None:
    clock = Clock()
    busy = Utilization(clock)

    async def loop() -> None:
        clock.now += 1  # not known yet: a ticker that never waits for input is not busy
        with busy.waiting():
            clock.now += 2
        clock.now += 5
        with busy.waiting():
            clock.now += 1

    await asyncio.create_task(loop())
    await asyncio.sleep(0)
    clock.now += 1
    assert busy.take() == pytest.approx(0.5)
