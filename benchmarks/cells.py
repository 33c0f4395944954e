"""Runs of `headrace up` as cells of a grid: starts them, stores their figures, and reads these from their streams.

A cell is a `headrace up` from a policy that was mid-trained once, and a process of this module next to it where a
benchmark needs its own actor. A cell's figures are kept in a file next to its folder, so that an interrupted benchmark
resumes. A cell that was run with other settings is run again.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.processors import Processors
from headrace.actors.trainer import initial_policy
from headrace.bus.broker.server import open_store, running
from headrace.bus.connection import Bus
from headrace.bus.runtime.supervisor import run_actors
from headrace.config import load
from headrace.messages import subjects as s
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.judging import Score
from headrace.messages.ledger import SlotIssued
from headrace.messages.training import SnapshotReady, StepDone, StepFailed, StepManifest
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from headrace.parent_death import ending_with_parent
from headrace.training.trainer import PolicyTrainer

Interval = tuple[float, float]
"""Seconds since the run's first slot was issued."""

GROUPS = (
    '[["curriculum","evaluator","dead_letter"],["judge"],["rollout"],["trainer"],["weight_sender","weight_receiver"]]'
)


@dataclass(frozen=True)
class Cell:
    """One run."""

    bound: int
    waits: bool
    seed: int
    backend: str = "process"

    @property
    def name(self) -> str:
        """Also the run's id."""
        side = f"async{self.bound}" if self.bound else "sync"
        place = "" if self.backend == "process" else f"-{self.backend}"
        return f"{side}-{'waits' if self.waits else 'plain'}{place}-s{self.seed}"


class Seen(msgspec.Struct, kw_only=True):
    """The figures of a run, from its streams."""

    wall_s: float
    tokens_per_s: float
    trainer_busy: float
    rollout_busy: float
    """From the heartbeats of the rollout actor."""
    issued: int
    dropped: int
    balanced: bool
    failed_steps: list[StepFailed]
    steps: list[tuple[float, StepDone]]
    """(time, outcome)."""
    sampled: dict[int, list[float]]
    """Rewards of training attempts by the oldest version that wrote one of their tokens."""
    by_length: Any
    cpu_s: dict[str, float] = {}
    begun: float = 0.0
    """Time of the first SlotIssued."""
    spent: dict[str, float] = {}
    """CPU-seconds by part (`benchmarks.processors`) from the first SlotIssued to the last step's end."""
    last_issue_s: float = 0.0
    training: list[Interval] = []
    """From each manifest to its outcome."""
    episodes: list[Interval] = []
    """From each SlotIssued to its Trajectory."""
    written_s: list[float] = []
    """From a step's outcome to its snapshot file."""
    weights: list[Interval] = []
    """From a snapshot file to the engine that serves it: encoded, published, staged, swapped."""
    evaluations: list[Interval] = []
    load: float = 0.0
    """Load average of the machine at the end of the run, which shows other work on it."""

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """(time, mean reward of the batch) by step."""
        return [(moment, done.reward_mean) for moment, done in self.steps]

    @property
    def window(self) -> Interval:
        """From the first step's end to the last SlotIssued, because the first samples and the last steps are not
        typical."""
        return self.steps[0][0], max(self.last_issue_s, self.steps[0][0])

    @property
    def attempts_per_s(self) -> float:
        """Trained attempts per second."""
        return sum(done.trained_slots for _, done in self.steps) / self.wall_s

    def trainer_busy_within(self) -> float | None:
        """1 - (time that the trainer waited for a batch) / window; None without a window."""
        begin, end = self.window
        waits = [(at - done.waited_s, at) for (at, _), (_, done) in zip(self.training, self.steps, strict=False)]
        return None if end <= begin else 1.0 - share(waits, [(begin, end)], end - begin)

    def rollout_busy_within(self) -> float | None:
        """Share of the window in which at least one episode was in flight; None without a window."""
        begin, end = self.window
        return None if end <= begin else share(self.episodes, [(begin, end)], end - begin)

    def in_flight(self) -> float:
        """Mean number of concurrent episodes."""
        return sum(end - begin for begin, end in self.episodes) / self.wall_s

    def at_samples(self, steps: int = 5) -> float:
        """Mean reward of the last batches."""
        rewards = [reward for _, reward in self.rewards[-steps:]]
        return sum(rewards) / len(rewards)

    def at_wall(self, limit: float, steps: int = 5) -> float:
        """Mean reward of the last batches that were trained on before a moment."""
        before = [reward for moment, reward in self.rewards if moment <= limit][-steps:]
        return sum(before) / len(before) if before else self.rewards[0][1]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals: without overlaps, ascending."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that intervals cover."""
    return sum(end - begin for begin, end in union(intervals))


def share(of: Iterable[Interval], under: Iterable[Interval], total: float) -> float:
    """Seconds covered by both kinds of interval, over a total; 0 for an empty total."""
    over = union(under)
    both = [(max(a, c), min(b, d)) for a, b in union(of) for c, d in over if max(a, c) < min(b, d)]
    return length(both) / total if total > 0 else 0.0


def settings(args: argparse.Namespace, cell: Cell, root: Path) -> list[str]:
    """Overrides of deploy/demo.toml."""
    return [
        f"run.dir={root}",
        f"run.id={cell.name}",
        f"run.seed={cell.seed}",
        f"environment.backend={cell.backend if cell.backend != 'process' else args.backend}",
        f"environment.max_vms={args.max_vms}",
        f"rollout.credit={args.credit}",
        f"processes.groups={GROUPS}",
        "production.enabled=false",
        "production.simulated_requests_per_s=0",
        "environment.production_share=0",
        "evaluation.before=false",
        "evaluation.after=false",
        f"curriculum.staleness={cell.bound}",
        f"curriculum.steps={args.steps}",
        f"curriculum.groups_per_step={args.groups}",
        f"curriculum.group_size={args.group_size}",
        f"mid_training.tokens={args.tokens}",
        *args.set,
    ]


def prepare(args: argparse.Namespace, root: Path) -> Path:
    """Mid-train the policy that every cell starts from; its folder."""
    folder = root / "start"
    if not (folder / "checkpoints" / "checkpoint.safetensors").exists():
        config = load("deploy/demo.toml", settings(args, Cell(0, False, 1), root))
        bundle = initial_policy.bundle(config, folder)
        text, traces = bundle.tokenizer_json, initial_policy.mid_training(config, bundle)
        PolicyTrainer.prepare(config, folder / "checkpoints", tokenizer_json=text, traces=lambda: traces)
    return folder


async def beside(folder: Path, actors: Sequence[Any]) -> int:
    """The actors that a benchmark runs itself, because `headrace up` is told not to start them."""
    import asyncio

    async with asyncio.timeout(120):
        while (server := running(folder / "broker")) is None:
            await asyncio.sleep(0.05)
    config = load(folder / "config.json")
    return await run_actors(actors, config, folder.name, url=server.url, credentials=folder / "broker/credentials")


def whole_run(
    folder: Path, start: Path, overrides: Sequence[str], helper: Sequence[str], environ: dict[str, str], limit_s: float
) -> Seen:
    """Run a cell from its start to its audit, with the benchmark's own actor if there is one; the figures."""
    told = folder.with_suffix(".seen")
    setting = [*overrides, *(f"{name}={value}" for name, value in sorted(environ.items()))]
    if told.exists():
        cached_setting, cached = msgspec.msgpack.decode(told.read_bytes(), type=tuple[list[str], Seen])
        if cached_setting == setting:
            return cached
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    entries = [part for entry in overrides for part in ("--set", entry)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the child ends with this process
    with folder.with_suffix(".log").open("wb") as log:
        command = ["-m", "headrace.cli", "up", "deploy/demo.toml", *entries]
        helper_environ = os.environ | environ | {"OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen(ending_with_parent([sys.executable, *argv]), env=env, stdout=log, stderr=log)
            for argv, env in ((command, os.environ), (["-m", *helper], helper_environ))
        ]
        processors = Processors(*(child.pid for child in children))
        processors.start()
        try:
            code = children[0].wait(timeout=limit_s)
        finally:
            processors.stop()
            for child in children:
                child.terminate()
                child.wait()
    if code:
        sys.exit(f"{folder.name} ended with code {code}; {folder.with_suffix('.log')} says why")
    load = os.getloadavg()[0]
    seen = uvloop.run(read(folder))
    seen.load = round(load, 2)
    seen.spent = processors.between(seen.begun, seen.begun + seen.wall_s)
    told.write_bytes(msgspec.msgpack.encode((setting, seen)))
    return seen


async def read(folder: Path) -> Seen:
    """The streams of a run that is over."""
    server = await open_store(folder / "broker")
    try:
        async with await Bus.connect(server.url, role="operator", credentials=folder / "broker/credentials") as bus:
            return await told_by(bus, folder)
    finally:
        await server.stop()


async def told_by(bus: Bus, folder: Path) -> Seen:
    """The figures of a run's streams over an open connection."""
    run = folder.name
    issued: dict[str, float] = {}
    async for received in bus.history("HR_LEDGER", s.LEDGER.where(run=run)):
        slot = received.message
        if isinstance(slot, SlotIssued) and slot.lane == "train":
            issued[f"{slot.group}-{slot.slot}-{slot.attempt}"] = received.time
    begin = min(issued.values())
    manifests: dict[int, float] = {}
    steps: list[tuple[float, StepDone]] = []
    failed: list[StepFailed] = []
    async for received in bus.history("HR_STEP", s.STEP.at(run=run)):
        match received.message:
            case StepManifest() as manifest:
                manifests[manifest.step] = received.time - begin
            case StepFailed() as outcome:
                failed.append(outcome)
            case StepDone() as outcome:
                steps.append((received.time - begin, outcome))
    episodes: list[Interval] = []
    written_by: dict[int, int] = {}
    async for received in bus.history("HR_TRAJ", s.TRAJ.where(run=run)):
        made = received.message
        if made.id in issued:
            episodes.append((issued[made.id] - begin, received.time - begin))
            written_by[received.seq] = made.oldest_version
    sampled: dict[int, list[float]] = {}
    async for received in bus.history("HR_SCORE", s.SCORE.where(run=run)):
        score = received.message
        if isinstance(score, Score) and score.trajectory_seq in written_by:
            sampled.setdefault(written_by[score.trajectory_seq], []).append(score.reward)
    ready, served, asked, answered = dict[int, float](), dict[int, float](), dict[str, float](), dict[str, float]()
    async for received in bus.history("HR_EVENT", s.EVENT.where(run=run)):
        at = received.time - begin
        match received.message:
            case SnapshotReady() as event:
                ready.setdefault(event.version, at)
            case WeightsSwapped() | WeightsStaged() as event:
                served[event.version] = max(at, served.get(event.version, at))
            case EvalRequest() as event:
                asked[event.id] = at
            case EvalResult() as event:
                answered[event.id] = at
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    ledger, wall = report["ledger"], steps[-1][0]
    return Seen(
        wall_s=wall,
        tokens_per_s=sum(done.tokens for _, done in steps) / wall,
        trainer_busy=1.0 - min(1.0, sum(done.waited_s for _, done in steps) / wall),
        rollout_busy=report["rollout_busy"],
        issued=ledger["issued"],
        dropped=sum(count for reason, count in ledger["dropped"].items() if reason != "cancelled"),
        balanced=ledger["balanced"],
        failed_steps=failed,
        steps=steps,
        sampled=sampled,
        by_length=ledger.get("dropped_by_length", {}),
        cpu_s=report["cpu_s"],
        begun=begin,
        last_issue_s=max(issued.values()) - begin,
        training=[(manifests[done.step], at) for at, done in steps],
        episodes=episodes,
        written_s=[ready[done.version] - at for at, done in steps if done.version in ready],
        weights=[(at, served[version]) for version, at in ready.items() if version in served],
        evaluations=[(at, answered[id]) for id, at in asked.items() if id in answered],
    )
