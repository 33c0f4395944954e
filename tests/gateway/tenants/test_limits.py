"""Rates of keys, and places for turns: fair, bounded, and given back however a turn ends."""

import asyncio
import random
from collections import Counter

import pytest

from headrace.gateway.http import HttpRefused, retry_after
from headrace.gateway.tenants import limits
from headrace.gateway.tenants.limits import RateLimit, Rounds, TurnsAtOnce

pytestmark = pytest.mark.anyio


def test_a_bucket_refills() -> None:
    now = 0.0
    limit = RateLimit(burst_s=2.0, clock=lambda: now)
    assert [limit.take("k", 60) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert limit.take("other", 60) == 0.0
    now = 1.0
    assert limit.take("k", 60) == 0.0 and limit.take("k", 60) == pytest.approx(1.0)
    assert retry_after(0.2) == "1" and retry_after(1.2) == "2"


def test_a_bucket_owes_what_was_taken_beyond_it() -> None:
    now = 0.0
    limit = RateLimit(burst_s=60.0, clock=lambda: now)
    assert limit.wait("k", 600, 1.0) == 0.0
    limit.spend("k", 600, 1200.0)
    assert limit.wait("k", 600, 1.0) == pytest.approx(60.1)
    now = 60.1
    assert limit.wait("k", 600, 1.0) == pytest.approx(0.0)


class Running:
    """Turns that end when the test says so."""

    def __init__(self, places: int) -> None:
        self.turns, self.running = TurnsAtOnce(places), Counter[str]()
        self.order: list[str] = []
        self._ends: dict[asyncio.Task[None], asyncio.Event] = {}

    def ask(self, tenant: str) -> "asyncio.Task[None]":
        end = asyncio.Event()

        async def turn() -> None:
            async with self.turns.turn(tenant):
                self.order.append(tenant)
                self.running[tenant] += 1
                try:
                    await end.wait()
                finally:
                    self.running[tenant] -= 1

        task = asyncio.create_task(turn())
        self._ends[task] = end
        return task

    def end(self, task: "asyncio.Task[None]") -> None:
        self._ends[task].set()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_tenants_that_wait_get_places_in_turn() -> None:
    running = Running(4)
    first = [running.ask("many") for _ in range(20)]
    await running.settle()
    assert running.running == {"many": 3}, "one place stays free for others"
    others = [running.ask(name) for name in ("a", "b", "b")]
    await running.settle()
    assert running.running == {"many": 3, "a": 1}
    for task in first[:3]:
        running.end(task)
    await running.settle()
    assert running.order[4:] == ["many", "b", "many"], "each tenant that waits gets the next place in turn"
    for task in [*first, *others]:
        running.end(task)
    await asyncio.gather(*first, *others)
    assert not running.turns._of and not running.turns._waiting


async def test_the_queue_of_a_tenant_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITING", 5)
    running = Running(4)
    tasks = [running.ask("many") for _ in range(12)]
    await running.settle()
    refused = [task.exception() for task in tasks if task.done()]
    assert len(refused) == 12 - 3 - 5
    assert all(isinstance(error, HttpRefused) and error.status == 429 and error.retry_s > 0 for error in refused)
    for task in tasks:
        running.end(task)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_turn_waits_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAIT_S", 0.02)
    running = Running(1)
    held = running.ask("a")
    await running.settle()
    with pytest.raises(HttpRefused, match="no place for this turn"):
        await running.ask("b")
    running.end(held)
    await held
    assert not running.turns._of and not running.turns._waiting


@pytest.mark.parametrize("seed", range(20))
async def test_a_many_of_turns_ends_and_leaves_gives_every_place_back(seed: int) -> None:
    rng, running = random.Random(seed), Running(6)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(400):
        match rng.randrange(4):
            case 0 | 1:
                tasks.append(running.ask(rng.choice("abc")))
            case 2 if tasks:
                rng.choice(tasks).cancel()
            case 3 if tasks:
                running.end(rng.choice(tasks))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        assert running.running.total() <= 6 and max(running.running.values(), default=0) <= 4
    for task in tasks:
        running.end(task)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not running.turns._of and not running.turns._waiting and running.running.total() == 0


async def test_a_request_waits_for_one_round_behind_many_of_another_tenant() -> None:
    """However many requests another tenant sent before it."""
    rounds, order = Rounds(), list[str]()

    async def one(tenant: str) -> None:
        await rounds.enter(tenant)
        order.append(tenant)

    many = [asyncio.create_task(one("a")) for _ in range(500)]
    await asyncio.sleep(0)
    left = many[1:100]
    for task in left:
        task.cancel()
    await asyncio.gather(*(one("b") for _ in range(3)), return_exceptions=True)
    assert order.index("b") <= 2 and order.count("a") <= 5
    await asyncio.gather(*many, return_exceptions=True)
    assert order.count("a") == 401 and order.count("b") == 3 and not rounds._waiting
