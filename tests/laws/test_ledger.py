"""Laws 2 and 3 of a whole run: the ledger balances at every moment, whichever actor is killed, and no token is too old.

Curriculum, trainer side and rollouts meet over a real broker; what fills the slots is a script that is slow, fails and
dies at random. The audit reads the streams while all of that goes on.
"""

import asyncio
import itertools
import random
from secrets import token_hex
from typing import Literal

import pytest

from headrace import config as c
from headrace.actors.curriculum import Curriculum
from headrace.bus.connection import Bus
from headrace.messages.rollout import RolloutRequest
from headrace.messages.subjects import EVENT
from headrace.replay.audit import audit, prove
from tests.conftest import Connect
from tests.support.fake_workers import FakeWorkers
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
P, SIZE, STEPS = 2, 3, 6


def config(bound: int, on_stale: Literal["wait", "drop"]) -> c.Config:
    return c.Config(
        curriculum=c.Curriculum(group_size=SIZE, groups_per_step=P, staleness=bound, steps=STEPS, on_stale=on_stale),
        evaluation=c.Evaluation(before=False, after=False),
    )


class FaultyWorkers(FakeWorkers):
    """Answers in any order; every eighth attempt fails, and some engines lag behind as far as they may."""

    def __init__(self, bus: Bus, run: str, bound: int, seed: int) -> None:
        super().__init__(bus, run, groups_per_step=P, bound=bound)
        self.random = random.Random(seed)
        self.train = True
        self.answer = self.late
        self._held: list[RolloutRequest] = []
        self._answers = itertools.count(1)

    async def late(self, request: RolloutRequest) -> None:
        """Hold a request back until others have come, or nobody else comes."""
        self._held.append(request)
        await asyncio.sleep(0.005 * self.random.random())
        taken = self._held.pop(self.random.randrange(len(self._held)))
        if next(self._answers) % 8 == 0:
            await self.fail(taken, self.random.choice(["sandbox_lost", "engine_error"]))
            return
        await self.solve(taken, version=self.random.randint(min(taken.min_version, self.version), self.version))


async def finished(bus: Bus, run: str) -> None:
    async for received in bus.follow("HR_EVENT", EVENT.where(run=run, actor="curriculum", type="event")):
        if received.message.kind == "run_finished":
            return


@pytest.mark.parametrize(("bound", "on_stale"), [(0, "wait"), (1, "wait"), (1, "drop"), (2, "drop")])
async def test_the_books_balance_while_curricula_are_killed(
    connect: Connect, bound: int, on_stale: Literal["wait", "drop"]
) -> None:
    run = f"r{token_hex(4)}"
    counterpart = FaultyWorkers(await connect(), run, bound, seed=bound)
    await counterpart.start()
    await counterpart.serve(0)
    outsider = await connect("operator")
    end = asyncio.create_task(finished(counterpart.bus, run))
    lives = 0
    while not end.done():
        actor = Curriculum(config(bound, on_stale), await connect("curriculum"), run, f"c-{lives}")
        await actor.start()
        lives += 1
        # The first ones are killed in the middle of what the next closing sets off; the last one may finish.
        further = asyncio.create_task(counterpart.closed(min(2 * lives + 1, STEPS * P)))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({end, further} if lives < 5 else {end}, return_when=asyncio.FIRST_COMPLETED)
        further.cancel()
        await asyncio.gather(further, return_exceptions=True)
        for task in list(actor._tasks):
            task.cancel()
        assert actor.state.problems == []
        report, wrong = await prove(outsider, run)
        assert wrong == []
        assert report.staleness_max <= bound
    await counterpart.stop()
    report = await audit(outsider, run)
    assert report.balanced
    assert report.in_flight == 0
    assert report.duplicates == 0
    assert report.attempts.running == 0
    assert lives == 5
    assert on_stale == "drop" or "stale" not in report.dropped
    assert report.attempts.lost.get("sandbox_lost", 0) + report.attempts.lost.get("engine_error", 0) > 0
    assert counterpart.steps == STEPS
