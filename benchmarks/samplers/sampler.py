"""A simulated sampler: speaks the protocol of a rollout actor, and sleeps for recorded times instead of computing.

Real: the pull of a RolloutRequest from the run's durable consumer, the acknowledgement and its renewals, the turn log
(TurnSampled, TurnDone, resumption), the Trajectory, the swap's events, the admission of the train lane. Simulated: the
engine, the calls, the tokens. A Trajectory's spans name the versions that the sampler had while the turn's time passed.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from benchmarks.samplers.recorded import RecordedTurn, Trace
from headrace.actors.rollout.publication import publish
from headrace.actors.rollout.turn_log import TurnLog
from headrace.bus.errors import WrongSequence
from headrace.bus.nats.consumer import Consumer
from headrace.bus.nats.received import Received
from headrace.bus.runtime import ack_waits
from headrace.bus.runtime.actor import Actor
from headrace.ledger.seeds import seed_of
from headrace.messages.base import Array
from headrace.messages.ledger import Admission, admission_key
from headrace.messages.rollout import RolloutRequest, Span, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.subjects import EVENT, TASK
from headrace.messages.tasks import ANSWER
from headrace.messages.weights import WeightsStaged, WeightsSwapped

ANSWERS = (b"answer: 2", b"answer: 3")
"""The last message of an episode; the checker passes the first."""

Cause = Literal["turns", "bus", "swap", "handover", "slot"]
"""The ways in which a sampler spends time. turns: sampling and calls, as recorded; bus: the messages of an episode and
the wait for a processor; swap: the engine's pause, and the wait for the version that a slot needs; handover: from the
request in the stream, or from the sampler's readiness where that is later, to the request here; slot: no request is in
the stream, because the staleness bound gives no credit (or the curriculum has not used it yet)."""
Part = Literal["episode", "turns", "pause", "swap", "handover", "slot"]
"""Intervals that are recorded. turns and pause lie within an episode, the others between two."""


class Times(msgspec.Struct, kw_only=True):
    """Time of samplers within a window."""

    seconds: dict[Cause, float] = {}
    handover_s: list[float] = []
    """Of every request that was handed over in the window."""
    episodes: int = 0
    resumed: int = 0
    """Attempts that another sampler had begun, in the whole run."""
    superseded: int = 0


@dataclass(slots=True)
class Timeline:
    """The intervals of one sampler; times since the epoch."""

    parts: list[tuple[Part, float, float]] = field(default_factory=list)
    handovers: list[tuple[float, float]] = field(default_factory=list)
    """(time, seconds)."""
    idle_since: float | None = None
    busy_since: float | None = None
    closed_since: float | None = None
    """Since when its train lane waits for a version; None while the lane is open."""
    closed_s: float = 0.0
    """Seconds for which the lane was closed since `idle_since`."""
    resumed: int = 0
    superseded: int = 0

    def idle(self) -> None:
        """It is ready for a request from now on."""
        now = time.time()
        if self.busy_since is not None:
            self.parts.append(("episode", self.busy_since, now))
        self.busy_since, self.idle_since, self.closed_s = None, now, 0.0
        if self.closed_since is not None:
            self.closed_since = now

    def lane(self, opened: bool) -> None:
        """Its lane is open or closed from now on."""
        if not opened:
            self.closed_since = self.closed_since or time.time()
        elif self.closed_since is not None:
            self.closed_s += time.time() - self.closed_since
            self.closed_since = None

    def handed(self, stored: float) -> None:
        """A request arrived, which the stream stored at `stored`."""
        now = time.time()
        if self.idle_since is not None:
            swapped = min(now, self.idle_since + self.closed_s)
            at = min(now, max(swapped, stored))
            self.parts += [("swap", self.idle_since, swapped), ("slot", swapped, at), ("handover", at, now)]
            self.handovers.append((now, now - at))
        self.idle_since, self.busy_since = None, now

    def within(self, begin: float, end: float) -> Times:
        """Its times within a window that has passed."""
        open_parts: list[tuple[Part, float, float]] = []
        if self.idle_since is not None:
            open_parts.append(("swap" if self.closed_since is not None else "slot", self.idle_since, end))
        if self.busy_since is not None:
            open_parts.append(("episode", self.busy_since, end))
        spent: defaultdict[Part, float] = defaultdict(float)
        for part, first, last in (*self.parts, *open_parts):
            spent[part] += max(0.0, min(last, end) - max(first, begin))
        return Times(
            seconds={
                "turns": spent["turns"],
                "bus": max(0.0, spent["episode"] - spent["turns"] - spent["pause"]),
                "swap": spent["swap"] + spent["pause"],
                "handover": spent["handover"],
                "slot": spent["slot"],
            },
            handover_s=[took for at, took in self.handovers if begin <= at <= end],
            episodes=sum(part == "episode" and begin <= last <= end for part, _, last in self.parts),
            resumed=self.resumed,
            superseded=self.superseded,
        )


class Shared:
    """The samplers of one process in one run."""

    def __init__(self, trace: Trace, speed: float, count: int) -> None:
        self.trace, self.speed = trace, speed
        self.timelines: list[Timeline] = []
        self._missing = count
        self.ready = asyncio.Event()
        """Set once all samplers have started."""

    def timeline(self) -> Timeline:
        """The timeline of one more sampler."""
        self.timelines.append(Timeline())
        return self.timelines[-1]

    def started(self) -> None:
        """One more sampler has started."""
        self._missing -= 1
        if self._missing == 0:
            self.ready.set()

    def times(self, begin: float, end: float) -> Times:
        """The times of all samplers within a window."""
        each = [timeline.within(begin, end) for timeline in self.timelines]
        seconds: defaultdict[Cause, float] = defaultdict(float)
        for times in each:
            for cause, spent in times.seconds.items():
                seconds[cause] += spent
        return Times(
            seconds=dict(seconds),
            handover_s=[round(took, 6) for times in each for took in times.handover_s],
            episodes=sum(times.episodes for times in each),
            resumed=sum(times.resumed for times in each),
            superseded=sum(times.superseded for times in each),
        )


class Sampler(Actor):
    """RolloutRequest in; TurnSampled, TurnDone, Trajectory, WeightsSwapped out."""

    role: ClassVar[str] = "rollout"
    shared: ClassVar[Shared]

    async def start(self) -> None:
        """Follow versions and admission, then pull one request at a time."""
        self._trace, self._speed = self.shared.trace, self.shared.speed
        self.version, self._newest, self._min_version = -1, -1, -1
        self._staged, self._swapped = asyncio.Event(), asyncio.Condition()
        self._swaps: list[tuple[float, int, float]] = []
        """(time, version, pause in seconds)."""
        self._draws = random.Random(seed_of(self.config.run.seed, self.id))
        self._timeline = self.shared.timeline()
        self._consumer: Consumer = await self.consume(
            TASK,
            self._handle,
            durable=f"rollout-{self.run}-train",
            filter=TASK.where(run=self.run, lane="train"),
            credit=1,
            ack_wait=ack_waits.ROLLOUT_S / self._speed,
        )
        self._timeline.idle()
        self._open_lane()
        self.spawn(self._follow_staged(), "staged versions")
        self.spawn(self._swap(), "weights")
        self.spawn(self._follow_admission(), "admission")
        self.shared.started()

    async def _spend(self, seconds: float, part: Part) -> None:
        """Let recorded seconds of an episode pass at the run's speed."""
        now = time.time()
        self._timeline.parts.append((part, now, now + seconds / self._speed))
        await asyncio.sleep(seconds / self._speed)

    def _open_lane(self) -> None:
        """Pull only with weights at or above the train lane's `min_version`, as a rollout actor does."""
        behind = self.version < max(0, self._min_version)
        self._consumer.pause() if behind else self._consumer.resume()
        self._timeline.lane(not behind)

    async def _follow_staged(self) -> None:
        async for received in self.bus.follow("HR_EVENT", EVENT.where(run=self.run, type=WeightsStaged.type_name)):
            staged = received.message
            if isinstance(staged, WeightsStaged) and staged.node == self.bus.node:
                self._newest = max(self._newest, staged.version)
                self._staged.set()

    async def _swap(self) -> None:
        """Switch to the newest staged version, after a recorded time; versions in between are skipped."""
        while True:
            await self._staged.wait()
            self._staged.clear()
            if (version := self._newest) <= self.version:
                continue
            await asyncio.sleep(self._draws.choice(self._trace.swapped_s) / self._speed)
            pause_ms = self._draws.choice(self._trace.pause_ms)
            self.version = version
            self._swaps.append((time.time(), version, pause_ms / 1e3))
            self._open_lane()
            async with self._swapped:
                self._swapped.notify_all()
            await self.publish_event(
                WeightsSwapped(
                    run=self.run,
                    rollout=self.id,
                    node=self.bus.node,
                    version=version,
                    state_hash=f"simulated-{version}",
                    pause_ms=pause_ms,
                )
            )
            if self._newest > version:
                self._staged.set()

    async def _follow_admission(self) -> None:
        state = await self.bus.kv("HR_ADMISSION")
        async for _, admission, _ in state.watch(admission_key(self.run)):
            if isinstance(admission, Admission):
                self._min_version = admission.min_version
                self._open_lane()

    async def _handle(self, received: Received[RolloutRequest]) -> None:
        """Work on one request."""
        timeline, request = self._timeline, received.message
        timeline.handed(received.time)
        timeline.resumed += received.deliveries > 1
        try:
            log = TurnLog(self.bus, request.run, request.group, request.trajectory)
            resume = await log.read()
            if not resume.finished:
                waited = time.time()
                async with self._swapped:
                    await self._swapped.wait_for(lambda: self.version >= max(0, request.min_version))
                timeline.parts.append(("pause", waited, time.time()))
                await self._attempt(request, log, list(resume.turns))
        except WrongSequence as error:  # another sampler has this attempt now
            received.settled = True
            timeline.superseded += 1
            await self.event("superseded", str(error), "warning", trajectory=request.trajectory)
        finally:
            timeline.idle()

    async def _attempt(self, request: RolloutRequest, log: TurnLog, turns: list[Turn]) -> None:
        """Run an attempt from its recorded turns on."""
        draws, began = random.Random(request.seed), time.time()
        episode = draws.choice(self._trace.episodes)
        for index, row in enumerate(episode.turns):
            if index >= len(turns):
                mark, versions = len(self._swaps), [(time.time(), self.version)]
                await self._spend(row.sample_s, "turns")
                for _, _, pause in self._swaps[mark:]:
                    await self._spend(pause, "pause")
                versions += [(at, version) for at, version, _ in self._swaps[mark:]]
                turns.append(sampled(row, turns, versions, time.time()))
                await log.sampled(turns[index], "", "", "simulated")
            if turns[index].calls and not turns[index].results:
                await self._spend(row.calls_s, "turns")
                results = tuple(ToolResult(call_id=call.id, ok=True, output="") for call in turns[index].calls)
                turns[index] = msgspec.structs.replace(turns[index], results=results)
                await log.done(index, results)
        await log.flush()
        await self._spend(episode.end_s, "turns")
        answer = ANSWERS[draws.random() < 0.5]
        await publish(self.bus, self._trajectory(request, turns, answer, time.time() - began))

    def _trajectory(self, request: RolloutRequest, turns: Sequence[Turn], answer: bytes, wall_s: float) -> Trajectory:
        return Trajectory(
            run=request.run,
            lane=request.lane,
            group=request.group,
            slot=request.slot,
            attempt=request.attempt,
            id=request.trajectory,
            task=request.task,
            family="simulated",
            seed=request.seed,
            policy=request.policy,
            sampling=request.sampling,
            outcome="finished",
            turns=tuple(turns),
            diff={ANSWER: answer},
            fingerprint="simulated",
            isolation=request.isolation,
            wall_s=round(wall_s, 4),
            rollout=self.id,
        )


def sampled(row: RecordedTurn, before: Sequence[Turn], versions: Sequence[tuple[float, int]], end: float) -> Turn:
    """A turn with the recorded numbers of tokens.

    versions: (time, version) that the sampler had since the turn began; the tokens are sampled at an even rate. The
    last sampled token of the turn before is forwarded in this one.
    """
    context = sum(len(turn.prompt_ids) + len(turn.ids) for turn in before)
    first, last = max(0, context - 1), context + row.prompt_tokens + row.sampled_tokens - 1
    begin = versions[0][0]
    cuts = [first + round((last - first) * (at - begin) / max(end - begin, 1e-9)) for at, _ in versions] + [last]
    spans = [
        Span(start, stop, version)
        for (_, version), start, stop in zip(versions, cuts, cuts[1:], strict=False)
        if stop > start
    ]
    calls = (ToolCall(id=f"{len(before)}.0", name="simulated"),) if row.calls_s else ()
    return Turn(
        index=len(before),
        segment=0,
        prompt_ids=zeros("<i4", row.prompt_tokens),
        ids=zeros("<i4", row.sampled_tokens),
        logprobs=zeros("<f4", row.sampled_tokens),
        spans=tuple(spans),
        calls=calls,
    )


def zeros(dtype: str, count: int) -> Array:
    """An array of zeros of four bytes each."""
    return Array(dtype, (count,), bytes(4 * count))
