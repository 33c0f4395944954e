"""`headrace chaos`: a run as `headrace up` starts it, in which something dies all the time; then its books.

What dies, how and where stands in a plan (chaos_blows.py). Blows overlap, two at a time: the broker goes while the
trainer comes back, a machine while its environment sleeps. Nobody is told, and nothing is repaired by hand: what comes
back, comes back because `up`, supervisors and streams bring it back.

Recovered means:
- a process that was killed, stopped or cut: every actor in it runs and answers its ping, the killed one in a new
  process; counted from the blow, for one that was stopped from its waking up;
- the broker: it answers, and so does every actor through it that was not struck meanwhile;
- a machine: its environment has a machine that it did not have, or, woken up, answers. How long lost slots take to be
  issued again is counted from their SlotFailed, in the ledger.
At work again means the first durable record of its kind after that, however long it waits for input.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Config, load
from headrace.launch import chaos_blows as blows
from headrace.launch import chaos_figures
from headrace.launch.chaos_blows import BROKER, MACHINE, Card
from headrace.launch.chaos_figures import Struck
from headrace.launch.children import Child
from headrace.launch.output import complain, say
from headrace.launch.processes import Run, process_groups
from headrace.launch.runs import RunDir, RunError
from headrace.launch.signals import INTERRUPTED, Stopping, interruptible
from headrace.launch.up import through
from headrace.messages import subjects as s
from headrace.messages.judging import Score
from headrace.messages.operations import Beat, Ping

if TYPE_CHECKING:
    from headrace.dashboard.watch import Watch

AT_ONCE = 2
"""Blows whose victims are down at the same time."""
WORK_PER_BLOW = 8
"""Scores that a run must have per blow, or it is made longer: what dies shall have done something since."""
ROLES = {"weight_sender": "weight_sync", "weight_receiver": "weight_sync"}
"""Actors whose role is not their name."""
RECORDS = {
    "curriculum": ("HR_LEDGER", s.LEDGER, ""),
    "judge": ("HR_SCORE", s.SCORE, ""),
    "rollout": ("HR_TURN", s.TURN, ""),
    "trainer": ("HR_STEP", s.STEP, ""),
    "environment": ("HR_EVENT", s.EVENT, "tool_log"),
    "weight_sender": ("HR_EVENT", s.EVENT, "weights_staged"),
}
"""A process by its first actor, and the record that shows it at work: its stream, subject, type on HR_EVENT."""
POLL_S = 0.1
PING_S = (0.3, 0.6, 1.2, 2.4, 5.0)
"""How long an answer is waited for, try by try: one that was lost shall not count as a late one."""
MID_TRAINING = 0.06
"""Share of the run's work, as blows count it, that is mid-training."""


def lengthened(config: Config, kills: int) -> Config:
    """The configuration with as many steps as so many blows need."""
    curriculum = config.curriculum
    need = math.ceil(kills * WORK_PER_BLOW / (curriculum.groups_per_step * curriculum.group_size))
    if need <= curriculum.steps:
        return config
    return msgspec.structs.replace(config, curriculum=msgspec.structs.replace(curriculum, steps=need))


class Storm:
    """The blows of one run, beside it. `rage` is what `up` takes along."""

    def __init__(self, config: Config, kills: int, seed: int, limit_s: float) -> None:
        self.cards = blows.plan(config, kills, seed)
        self.struck: list[Struck] = []
        self.folder: RunDir | None = None
        self._limit_s = limit_s
        self._rng = random.Random(seed + 1)
        self._scores = self._middle = 0.0
        self._moved = asyncio.Event()
        self._down: set[str] = set()
        self._freed = asyncio.Condition()
        self._records: dict[str, tuple[float, asyncio.Event]] = {}

    async def rage(self, run: Run, watch: "Watch") -> None:
        """Strike as planned, until the last one has recovered; then sleep. RunError when the time is over."""
        self.folder = run.folder
        self._run, self._watch = run, watch
        groups = process_groups(run.config)
        self._children = {child.name: (child, group) for child, group in zip(run.children, groups, strict=True)}
        self._bus = await Bus.connect(run.broker.url, role="operator", credentials=run.broker.credentials)
        try:
            async with asyncio.timeout(self._limit_s), asyncio.TaskGroup() as group:
                group.create_task(self._count())
                for name in self._children:
                    first = self._children[name][1][0]
                    if first in RECORDS:
                        group.create_task(self._look(name, first))
                hands = asyncio.Semaphore(AT_ONCE)
                for number, card in enumerate(self.cards, 1):
                    await self._due(card.due)
                    await hands.acquire()
                    await self._take(card.victim)
                    say(f"blow {number} of {len(self.cards)}: {card.blow} {card.victim}")
                    group.create_task(self._befall(card, hands, group))
                await asyncio.Event().wait()
        except TimeoutError:
            raise RunError(f"the run was not over after {self._limit_s / 60:g} minutes", 1) from None
        finally:
            await self._bus.close()

    def progress(self) -> float:
        """Share of the run's work that is done, 0 to 1."""
        config = self._run.config
        groups = config.curriculum.steps * config.curriculum.groups_per_step
        if config.mid_training.tokens > 0 and not self._scores:
            done = self._watch.metric("trainer", "mid_training_tokens") / config.mid_training.tokens
            self._middle = max(self._middle, MID_TRAINING * min(done, 1.0))
            return self._middle
        return MID_TRAINING + (1 - MID_TRAINING) * self._scores / (groups * config.curriculum.group_size)

    async def _count(self) -> None:
        async for received in self._bus.follow("HR_SCORE", s.SCORE.where(run=self._run.folder.id)):
            if isinstance(received.message, Score) and received.message.lane == "train":
                self._scores += 1
                self._moved.set()

    async def _due(self, share: float) -> None:
        while self.progress() < share:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # mid-training says how far it is on core NATS only
                    await self._moved.wait()

    async def _take(self, victim: str) -> None:
        """Wait until nobody else has this victim in hand. Machines are many."""
        async with self._freed:
            await self._freed.wait_for(lambda: victim not in self._down)
            if victim != MACHINE:
                self._down.add(victim)

    async def _befall(self, card: Card, hands: asyncio.Semaphore, group: asyncio.TaskGroup) -> None:
        struck = Struck(card=card, at=time.time())
        strike = {BROKER: self._broker, MACHINE: self._machine}.get(card.victim, self._process)
        try:
            since = await strike(struck)
            struck.recovered_s = time.monotonic() - since
        finally:
            hands.release()
            async with self._freed:
                self._down.discard(card.victim)
                self._freed.notify_all()
        if card.victim in self._records:
            group.create_task(self._until_at_work(struck, since))

    async def _process(self, struck: Struck) -> float:
        card = struck.card
        child, names = self._children[card.victim]
        old = await self._alive(child)
        struck.at, since = time.time(), time.monotonic()
        self.struck.append(struck)
        if card.blow == "kill":
            os.kill(old, signal.SIGKILL)
        elif card.blow == "cut":
            struck.connections = blows.cut(
                old, [int(url.rpartition(":")[2]) for url in self._run.broker.url.split(",")]
            )
        else:
            async with _asleep(old):
                await asyncio.sleep(card.asleep_s)
            since = time.monotonic()
        await self._back(child, names, other_than=old if card.blow == "kill" else 0)
        return since

    async def _broker(self, struck: Struck) -> float:
        while not (pid := self._run.broker.pid):
            await asyncio.sleep(POLL_S)
        struck.at, since = time.time(), time.monotonic()
        self.struck.append(struck)
        if struck.card.blow == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            async with _asleep(pid):
                await asyncio.sleep(struck.card.asleep_s)
            since = time.monotonic()
        for name, (child, names) in self._children.items():
            if name not in self._down:
                await self._back(child, names)
        return since

    async def _machine(self, struck: Struck) -> float:
        [(child, names)] = [entry for entry in self._children.values() if "environment" in entry[1]]
        while not (before := blows.machines(await self._alive(child))):
            await asyncio.sleep(POLL_S)
        struck.at, since = time.time(), time.monotonic()
        self.struck.append(struck)
        chosen = self._rng.choice(sorted(before))
        if struck.card.blow == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
            while not set(blows.machines(await self._alive(child))) - set(before):
                await asyncio.sleep(POLL_S)
            return since
        async with _asleep(chosen):
            await asyncio.sleep(struck.card.asleep_s)
        since = time.monotonic()
        await self._back(child, names)
        return since

    async def _alive(self, child: Child) -> int:
        """The child's process id, as soon as it has one."""
        while child.process is None or child.process.returncode is not None:
            await asyncio.sleep(POLL_S)
        return child.process.pid

    async def _back(self, child: Child, names: tuple[str, ...], other_than: int = 0) -> None:
        """Return when every actor of the process runs and says so itself."""
        for timeout in itertools.chain(PING_S, itertools.repeat(PING_S[-1])):
            process = child.process
            while process is None or process.returncode is not None or process.pid == other_than:
                await asyncio.sleep(POLL_S)
                process = child.process
            asked = [self._runs(name, process.pid, timeout) for name in names]
            if all(await asyncio.gather(*asked)):
                return
            await asyncio.sleep(POLL_S)

    async def _runs(self, name: str, pid: int, timeout: float) -> bool:
        kind, _, given = name.partition(":")
        id = s.token(given) if given else f"{kind}-{pid}"
        where = s.RPC_NODE.at(service=ROLES.get(kind, kind), node=id, method="ping")
        try:
            beat = await self._bus.request(where, Ping(), timeout=timeout)
        except BusError:
            return False
        return isinstance(beat, Beat) and (beat.pid, beat.state) == (pid, "running")

    async def _look(self, name: str, first: str) -> None:
        """Remember when a process was last seen at work."""
        stream, subject, kind = RECORDS[first]
        filter = subject.where(run=self._run.folder.id, **({"type": kind} if kind else {}))
        self._records[name] = (0.0, asyncio.Event())
        async for received in self._bus.follow(stream, filter):
            _, seen = self._records[name]
            self._records[name] = (received.time, asyncio.Event())
            seen.set()

    async def _until_at_work(self, struck: Struck, since: float) -> None:
        name = struck.card.victim
        back = time.time()
        while self._records[name][0] < back:
            await self._records[name][1].wait()
        struck.working_s = time.monotonic() - since


@contextlib.asynccontextmanager
async def _asleep(pid: int) -> AsyncIterator[None]:
    """A process that is stopped meanwhile; it is woken up in any case, if it still lives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def chaos(args: argparse.Namespace) -> int:
    """The run, the blows, the books; 1 unless they balance and every blow fell."""
    if args.kills < 1:
        raise RunError("--kills: at least 1")
    config = lengthened(load(args.config, args.set), args.kills)
    storm = Storm(config, args.kills, args.seed, 60 * args.minutes)

    async def body(stopping: Stopping, closing: contextlib.AsyncExitStack) -> int:
        return await through(config, stopping, closing, storm.rage)

    ended = ""
    try:
        code = await interruptible(body)
    except (RunError, BusError) as error:
        code, ended = 1, str(error)
        if storm.folder is None:
            raise
        complain(ended)
    if storm.folder is None or code == INTERRUPTED:
        return code
    figures = await chaos_figures.collect(storm.folder, storm.struck, args.kills, args.seed, ended)
    say(chaos_figures.line(figures))
    met = all(target["met"] for target in chaos_figures.targets(figures).values())
    return 0 if code == 0 and met else 1
