"""One arm of the simulation: a broker and a run of its own, from its first slot to its audit."""

import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.conditions import Figures
from benchmarks.samplers.process import SUITE, Order, Part
from benchmarks.samplers.sampler import Cause, Times
from headrace import process_stat
from headrace.bus.broker.permissions import NAMES
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.ledger.seeds import seed_of
from headrace.messages import subjects as s
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import Event
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef, TestPlan
from headrace.messages.training import StepDone, StepManifest
from headrace.metrics.machine_use import MachineUse
from headrace.parent_death import die_with
from headrace.replay.audit import AuditReport, prove
from headrace.tasks.suites import write_suite

LOOK_S = 0.5
"""Time between two measurements of processes."""
LARGE, DOOMED = 2, 4
"""Number of processes of samplers that live, and of those that are killed in one arm."""
PARTS: tuple[Part, ...] = ("trainer", "judge", "curriculum")


class Arm(NamedTuple):
    """The setting of one run."""

    name: str
    bound: int
    on_stale: str = "wait"
    kill: bool = False
    """SIGKILL each process of samplers that may be killed, at a random moment."""
    whole: bool = False
    """Run to the last step; otherwise the run ends with the window, and the audit counts its slots in flight."""


class Size(NamedTuple):
    """The size of every arm."""

    samplers: int
    steps: int
    """Of the window. A run takes one step before it, and after its last issue the steps of the credit that is left."""
    groups: int
    group_size: int
    speed: float
    seed: int
    limit_s: float

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """The samplers of each process: large ones first, then those that hold a tenth and are killed in one arm."""
        doomed = max(DOOMED, self.samplers // 10)
        numbers = range(self.samplers)
        large = [tuple(numbers[at : self.samplers - doomed : LARGE]) for at in range(LARGE)]
        small = [tuple(numbers[self.samplers - doomed :][at::DOOMED]) for at in range(DOOMED)]
        return [share for share in (*large, *small) if share]


class Child:
    """A process of the simulation."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls) -> "Child":
        """Start it; it ends with this process."""
        pipe, ends = asyncio.subprocess.PIPE, partial(die_with, os.getpid())
        line = (sys.executable, "-m", "benchmarks.samplers.process")
        made = await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe, limit=1 << 26, preexec_fn=ends)
        return cls(made)

    async def ask(self, question: object) -> bytes:
        """Write one line; the line that it answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(question) + b"\n")
        if not (answer := await self.process.stdout.readline()):
            raise RuntimeError("a process of the simulation ended")
        return answer

    async def end(self) -> None:
        """Kill it with SIGKILL."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Processes:
    """The processes of all arms: one for each part, and one for each share of the samplers."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.parts: dict[str, Child] = {}

    async def __aenter__(self) -> "Processes":
        write_tasks(self.folder)
        names = [*PARTS, *(f"samplers_{number}" for number in range(len(self.size.shares)))]
        self.parts = dict(zip(names, await asyncio.gather(*(Child.start() for _ in names)), strict=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.end() for child in self.parts.values()))

    @property
    def doomed(self) -> list[str]:
        """The processes of samplers that are killed in one arm."""
        return [f"samplers_{number}" for number in range(LARGE, len(self.size.shares))]

    async def order(self, name: str, order: Order) -> None:
        """Start the actors of a part."""
        part, samplers = order.part, order.samplers
        if name.startswith("samplers_"):
            part, samplers = "samplers", self.size.shares[int(name.removeprefix("samplers_"))]
        await self.parts[name].ask(msgspec.structs.replace(order, part=part, samplers=samplers))

    async def kill(self, name: str, order: Order) -> None:
        """Kill a process of samplers; another one starts with the same samplers."""
        await self.parts[name].end()
        self.parts[name] = await Child.start()
        await self.order(name, order)


def write_tasks(folder: Path) -> None:
    """A suite of tasks without a sandbox, whose checker compares a number: the judge does all of its other work."""
    pairs = []
    for number in range(64):
        ref, plan = TaskRef(SUITE, str(number)), TestPlan(kind="command", argv=("true",))
        task = Task(ref=ref, family=SUITE, prompt="1 + 1?", files={}, allowed=(), tests=plan, sandbox=False)
        grading = Grading(kind="checker", checker="number", reference={"answer": "2"})
        oracle = Oracle(ref=ref, hidden={}, tests=plan, expected=(), solution={}, answer="answer: 2", grading=grading)
        pairs.append((task, oracle))
    write_suite(SUITE, folder / "suites" / SUITE, pairs, "benchmarks.samplers")


class Looks:
    """CPU seconds of processes over time."""

    def __init__(self, processes: Processes, broker: int) -> None:
        self._processes, self._broker = processes, broker
        self.rows: list[tuple[float, dict[str, float]]] = []
        self.machine: list[float] = []
        self._use = MachineUse()

    async def follow(self) -> None:
        """Look again and again."""
        while True:
            pids = {name: child.process.pid for name, child in self._processes.parts.items()}
            stats = {name: process_stat.read(pid) for name, pid in (pids | {"broker": self._broker}).items()}
            self.rows.append((time.time(), {name: stat.cpu_s for name, stat in stats.items() if stat is not None}))
            if (cpu := self._use.take().cpu) is not None:
                self.machine.append(cpu)
            await asyncio.sleep(LOOK_S)

    def busy(self, begin: float, end: float) -> dict[str, float]:
        """CPU seconds over seconds of wall of each process within a window. A killed process is left out."""
        rows = [row for row in self.rows if begin <= row[0] <= end]
        if len(rows) < 2:
            rows = self.rows
        (first, before), (last, after) = rows[0], rows[-1]
        wall = max(last - first, 1e-9)
        return {name: (after[name] - before[name]) / wall for name in after if after[name] >= before.get(name, 1e9)}


async def run_arm(arm: Arm, processes: Processes) -> Figures:
    """Run an arm to its end; its figures."""
    size, folder = processes.size, processes.folder
    run = f"samplers-{arm.name.replace('_', '-')}"
    async with Server(folder / arm.name) as broker:
        async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as bus:
            await declare(bus)
            order = Order(
                part="curriculum",
                url=broker.url,
                credentials=str(broker.credentials),
                folder=str(folder),
                run=run,
                seed=size.seed,
                bound=arm.bound,
                on_stale="drop" if arm.on_stale == "drop" else "wait",
                steps=size.steps + arm.bound + 2,
                groups=size.groups,
                group_size=size.group_size,
                speed=size.speed,
            )
            looks = Looks(processes, broker.pid)
            following = asyncio.create_task(looks.follow())
            killing = asyncio.create_task(kill(processes, order, bus)) if arm.kill else None
            try:
                async with asyncio.timeout(size.limit_s):
                    names = [name for name in processes.parts if name != "curriculum"]
                    await asyncio.gather(
                        *(
                            processes.order(name, msgspec.structs.replace(order, part=name))
                            if name in PARTS
                            else processes.order(name, order)
                            for name in names
                        )
                    )
                    await processes.order("curriculum", order)
                    await (ended(bus, run) if arm.whole else stepped(bus, run, size.steps))
                    killed = await killing if killing is not None else 0
            finally:
                following.cancel()
                if killing is not None:
                    killing.cancel()
            broker_s = looks.rows[-1][1]["broker"]
            stored, largest = await stream_sizes(bus)
            streams = await read(bus, run)
            window = streams.window(size.steps)
            answers = await asyncio.gather(*(child.ask(window) for child in processes.parts.values()))
            times = [msgspec.json.decode(answer, type=Times) for answer in answers]
            report, wrong = await prove(bus, run)
    figures = of_samplers(times, window) | of_ledger(report, wrong) | of_steps(streams, window)
    busy = looks.busy(*window)
    samplers = [share for name, share in busy.items() if name.startswith("samplers_")]
    figures |= {f"{name}_cpu_share": round(busy[name], 3) for name in (*PARTS, "broker")}
    figures |= {
        "samplers_cpu_share": round(sum(samplers), 3),
        "samplers_largest_cpu_share": round(max(samplers), 3),
        "machine_cpu_share": round(statistics.fmean(looks.machine), 3) if looks.machine else None,
        "stored_messages": stored,
        "broker_cpu_s_per_1000_stored": round(1e3 * broker_s / stored, 4),
        "largest_stream": largest[0],
        "largest_stream_bytes": largest[1],
        "load": round(os.getloadavg()[0], 2),
    }
    if arm.kill:
        figures["samplers_killed"] = killed
    return figures


async def kill(processes: Processes, order: Order, bus: Bus) -> int:
    """Kill one process of samplers at a random moment after each of the first steps; the number of killed samplers."""
    draws = random.Random(seed_of(order.seed, "kills"))
    waiting, killed, before = list(processes.doomed), 0, 0.0
    async for received in bus.follow("HR_STEP", s.STEP.at(run=order.run)):
        if not isinstance(received.message, StepDone):
            before = before or received.time
            continue
        await asyncio.sleep(draws.uniform(0.0, received.time - before))
        before = received.time
        name = waiting.pop(0)
        await processes.kill(name, order)
        killed += len(processes.size.shares[int(name.removeprefix("samplers_"))])
        if not waiting:
            break
    return killed


async def ended(bus: Bus, run: str) -> None:
    """Return when the curriculum says that the run has ended. RuntimeError if it gave up."""
    async for received in bus.follow("HR_EVENT", s.EVENT.where(run=run, actor="*", type="event")):
        event = received.message
        if isinstance(event, Event) and event.kind == "run_finished":
            return
        if isinstance(event, Event) and event.kind == "actor_gave_up":
            raise RuntimeError(event.text)


async def stepped(bus: Bus, run: str, step: int) -> None:
    """Return when a step is done."""
    async for received in bus.follow("HR_STEP", s.STEP.at(run=run)):
        if isinstance(received.message, StepDone) and received.message.step == step:
            return


async def stream_sizes(bus: Bus) -> tuple[int, tuple[str, int]]:
    """Messages that all streams have stored, and the largest stream with its bytes."""
    stored, sizes = 0, dict[str, int]()
    for name in NAMES:
        state = msgspec.json.decode(await bus.connection.api(f"STREAM.INFO.{name}"))["state"]
        stored += state["last_seq"]
        sizes[name] = state["bytes"]
    return stored, max(sizes.items(), key=lambda pair: pair[1])


class Streams(NamedTuple):
    """The times of a run's records."""

    issued: list[tuple[float, SlotIssued]]
    manifests: dict[int, float]
    steps: list[tuple[float, StepDone]]

    def window(self, steps: int) -> tuple[float, float]:
        """From the first step's end to that of a later one. Before it the samplers start; after it a whole run has no
        more slots for all of them."""
        return self.steps[0][0], self.steps[steps][0]


async def read(bus: Bus, run: str) -> Streams:
    """The records of a run."""
    issued, manifests, steps = [], dict[int, float](), []
    async for received in bus.history("HR_LEDGER", s.LEDGER.where(run=run)):
        if isinstance(received.message, SlotIssued):
            issued.append((received.time, received.message))
    async for received in bus.history("HR_STEP", s.STEP.at(run=run)):
        if isinstance(received.message, StepManifest):
            manifests[received.message.step] = received.time
        elif isinstance(received.message, StepDone):
            steps.append((received.time, received.message))
    return Streams(issued, manifests, steps)


def of_samplers(times: Sequence[Times], window: tuple[float, float]) -> Figures:
    """Shares of the samplers' time within the window, and the hand-over of requests."""
    begin, end = window
    causes: tuple[Cause, ...] = ("turns", "bus", "swap", "handover", "slot")
    seconds = {cause: sum(part.seconds.get(cause, 0.0) for part in times) for cause in causes}
    total = sum(seconds.values()) or 1.0
    handovers = sorted(took for part in times for took in part.handover_s)
    shares = {cause: round(seconds[cause] / total, 4) for cause in causes}
    return {
        "window_s": round(end - begin, 2),
        "utilisation": shares["turns"],
        **{f"{cause}_share": share for cause, share in shares.items() if cause != "turns"},
        "handover_p50_ms": round(1e3 * handovers[len(handovers) // 2], 2) if handovers else None,
        "handover_p99_ms": round(1e3 * handovers[int(0.99 * (len(handovers) - 1))], 2) if handovers else None,
        "episodes_in_window": sum(part.episodes for part in times),
        "resumed": sum(part.resumed for part in times),
        "superseded": sum(part.superseded for part in times),
    }


def of_steps(streams: Streams, window: tuple[float, float]) -> Figures:
    """The trainer's idle share, its speed and the staleness of its tokens."""
    begin, end = window
    idle = trained = 0.0
    ages: Counter[int] = Counter()
    for at, done in streams.steps:
        wait = streams.manifests[done.step]
        idle += max(0.0, min(wait, end) - max(wait - done.waited_s, begin))
        trained += done.trained_slots if begin < at <= end else 0
        ages.update({int(age): tokens for age, tokens in done.staleness.items()})
    wall = max(end - begin, 1e-9)
    tokens = sum(ages.values())
    return {
        "trainer_idle_share": round(idle / wall, 4),
        "trained_slots_per_s": round(trained / wall, 1),
        "staleness_tokens": {str(age): count for age, count in sorted(ages.items())},
        "staleness_mean_versions": round(sum(age * count for age, count in ages.items()) / max(tokens, 1), 3),
        "run_s": round(streams.steps[-1][0] - min(at for at, _ in streams.issued), 2),
    }


def of_ledger(report: AuditReport, wrong: Sequence[str]) -> Figures:
    """The verdict of the audit."""
    return {
        "balanced": report.balanced,
        "wrong": list(wrong[:5]),
        "issued": report.issued,
        "trained": report.trained,
        "in_flight": report.in_flight,
        "dropped": report.dropped,
        "attempts_lost": report.attempts.lost,
        "staleness_max": report.staleness_max,
        "staleness_bound": report.staleness_bound,
        "duplicates": report.duplicates,
        "skipped_records": report.skipped_count,
    }
