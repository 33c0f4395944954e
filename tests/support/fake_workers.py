"""The other side of curriculum, evaluator and trainer: fills slots and takes steps by script, over the real bus."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import UNSET, UnsetType

from headrace.algorithms.staleness import Bounds
from headrace.bus.connection import Bus
from headrace.bus.nats.received import Received
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages.judging import RubricScore
from headrace.messages.ledger import GroupClosed, StalenessBound
from headrace.messages.rollout import RolloutRequest, TokenKinds
from headrace.messages.subjects import CLOSE, EVENT, FAIL, SCORE, STEP, TASK, TRAJ
from headrace.messages.weights import WeightsSwapped
from tests.support import records
from tests.support.patience import PATIENCE_S


class FakeRollout(Actor):
    """Pulls requests as a rollout does."""

    role = "admin"


class FakeWorkers:
    """Requests come into `requests` or go to `answer`; with `train`, a step is taken whenever a batch is there."""

    def __init__(self, bus: Bus, run: str, *, groups_per_step: int, bound: int = 1, lanes: str = "*") -> None:
        self.bus, self.run, self.groups_per_step, self.bound = bus, run, groups_per_step, bound
        self.requests: asyncio.Queue[RolloutRequest] = asyncio.Queue()
        self.answer: Callable[[RolloutRequest], Awaitable[None]] | None = None
        self.train = False
        self.version = 0
        self.rubric: RubricScore | None = None
        self.closings: list[tuple[int, GroupClosed]] = []
        self._lanes = lanes
        self._changed = asyncio.Condition()
        self._rollout = FakeRollout(Config(), bus, run, "fake-rollout")
        self._passed = 0

    async def start(self) -> None:
        """Pull, and follow the closings."""
        await self._rollout.consume(
            TASK,
            self._handle,
            durable=f"rollout-{self.run}-any",
            filter=TASK.where(run=self.run),
            credit=64,
        )
        self._rollout.spawn(self._follow(), "closings")

    async def stop(self) -> None:
        """End the tasks; an error in one of them fails the test."""
        await self._rollout.shut(1)
        if self._rollout.failed.done():
            raise self._rollout.failed.result()

    async def serve(self, version: int) -> None:
        """An engine serves a version."""
        self.version = version
        swapped = WeightsSwapped(run=self.run, rollout="r", node="n", version=version, state_hash="h", pause_ms=0.1)
        await self.bus.publish(EVENT.at(run=self.run, actor="rollout", type="weights_swapped"), swapped)

    async def _handle(self, received: Received[RolloutRequest]) -> None:
        if self.answer is not None:
            await self.answer(received.message)
        else:
            self.requests.put_nowait(received.message)

    async def next_request(self) -> RolloutRequest:
        """The next unanswered request."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.requests.get()

    async def request_for(self, group: str, slot: int, attempt: int) -> RolloutRequest:
        """Skip to the request of one attempt."""
        while True:
            request = await self.next_request()
            if (request.group, request.slot, request.attempt) == (group, slot, attempt):
                return request

    async def solve(
        self,
        request: RolloutRequest,
        passed: bool | None = None,
        version: int | None = None,
        kinds: TokenKinds | UnsetType = UNSET,
    ) -> None:
        """Write the Trajectory and the Score of an attempt, under a version: the one that is served now. kinds: of its
        turn's sampled tokens."""
        version = max(self.version, request.min_version) if version is None else version
        made = records.trajectory(request, [version] * 3)
        turns = tuple(msgspec.structs.replace(turn, kinds=kinds) for turn in made.turns)
        made = msgspec.structs.replace(made, turns=turns)
        where = TRAJ.at(run=self.run, group=request.group)
        seq = await self.bus.publish(where, made, msg_id=f"{self.run}.{made.id}")
        self._passed += 1
        good = self._passed % 2 == 0 if passed is None else passed
        score = records.score(
            request.group,
            request.slot,
            request.attempt,
            trajectory_seq=seq,
            version=version,
            passed=good,
            lane=request.lane,
            task=request.task,
            run=self.run,
        )
        if self.rubric is not None:
            score = msgspec.structs.replace(score, rubric=self.rubric)
        subject = SCORE.at(run=self.run, judge="j1", group=request.group)
        await self.bus.publish(subject, score, msg_id=f"{self.run}.{seq}.j1")

    async def fail(self, request: RolloutRequest, reason: str) -> None:
        """Publish an infrastructure failure of an attempt."""
        failure = records.failed(request.group, request.slot, request.attempt, reason, lane=request.lane, run=self.run)
        where = FAIL.at(run=self.run, group=request.group)
        await self.bus.publish(where, failure, msg_id=f"{self.run}.{request.trajectory}.{reason}")

    async def step(self) -> None:
        """Take the next step over the closings that make up its batch."""
        k, per_step = self.steps, self.groups_per_step
        batch = self.closings[k * per_step : (k + 1) * per_step]
        assert len(batch) == per_step
        made = records.manifest(k, batch, run=self.run)
        seq = await self.bus.publish(STEP.at(run=self.run), made)
        slots = sum(len(closing.slots) for _, closing in batch)
        names = [closing.group for _, closing in batch]
        bound = self._bounds.at(k) if self._bounds is not None else self.bound
        done = records.done(k, names, slots, manifest_seq=seq, bound=bound, run=self.run)
        self._steps = k + 1
        await self.bus.publish(STEP.at(run=self.run), done)
        await self.serve(k + 1)
        async with self._changed:
            self._changed.notify_all()

    _steps = 0
    _bounds: Bounds | None = None

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._steps

    async def closed(self, count: int) -> None:
        """Wait until so many groups are closed."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.closings) >= count)

    async def stepped(self, count: int) -> None:
        """Wait until so many steps are taken."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.steps >= count)

    async def _follow(self) -> None:
        async for received in self.bus.follow("HR_SCORE", CLOSE.where(run=self.run)):
            if isinstance(received.message, StalenessBound):
                said = received.message
                bounds = self._bounds
                self._bounds = bounds.changed(said.first_batch, said.bound) if bounds else Bounds.constant(said.bound)
            if isinstance(received.message, GroupClosed):
                self.closings.append((received.seq, received.message))
                async with self._changed:
                    self._changed.notify_all()
                while self.train and len(self.closings) >= (self.steps + 1) * self.groups_per_step:
                    await self.step()
