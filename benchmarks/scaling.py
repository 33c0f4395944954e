"""Does the reward grow with the compute of reinforcement learning? One recipe, several seeds, several points of each.

    python -m benchmarks.scaling [--seeds 1,2,3] [--steps 40] [--every 5] [--tasks 120] [--folder runs] [--only-fit]

Every seed is a whole run of `headrace up deploy/demo.toml` on the process backend that measures the held-out suite
every few steps, at temperature 1. A seed whose run has ended in `--folder` is read and not run again, so the benchmark
can be stopped and started again; the run of a seed that was interrupted starts anew under another number.

The compute of a version is 6 floating-point operations per active parameter and sampled token, over the tokens of all
steps up to it (`StepDone.tokens`). Tokens that are only read, sampling and mid-training are not part of it. The fit is
least squares of the pass rate over log10 of the compute, of each seed and of all together; version 0 has no compute, so
it is reported and not fitted. A pass rate is at most 1, so the line holds for the measured range alone.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.conditions import Figures, at_least, finish
from headrace.config import load
from headrace.launch.runs import RunDir, find
from headrace.launch.session import bus_of
from headrace.messages.subjects import STEP
from headrace.messages.training import StepDone
from headrace.policy.layout.hugging_face import from_section

SUITE = "generated/heldout"


class Point(NamedTuple):
    """One version of a seed's run."""

    version: int
    tokens: int
    """Trained by all steps up to it."""
    flop: float
    rate: float


class Line(NamedTuple):
    """A least-squares line: rate = intercept + slope x log10(flop)."""

    slope: float
    slope_error: float | None
    """Standard error; None for two points."""
    intercept: float
    residuals: tuple[float, ...]
    r2: float | None
    """None where all pass rates are equal."""


def fitted(points: Sequence[Point]) -> Line:
    """The line through points that have compute. ValueError for fewer than two of them."""
    used = [point for point in points if point.flop > 0]
    if len({point.flop for point in used}) < 2:
        raise ValueError("a fit needs at least two versions with compute: raise --steps or lower --every")
    xs, ys = [math.log10(point.flop) for point in used], [point.rate for point in used]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    intercept = y_mean - slope * x_mean
    residuals = tuple(y - intercept - slope * x for x, y in zip(xs, ys, strict=True))
    left, total = sum(each * each for each in residuals), sum((y - y_mean) ** 2 for y in ys)
    error = math.sqrt(left / (len(used) - 2) / spread) if len(used) > 2 else None
    return Line(slope, error, intercept, residuals, 1.0 - left / total if total else None)


def ended(folder: Path, seed: int) -> RunDir | None:
    """The seed's run that has ended, if there is one."""
    for path in sorted(folder.glob(f"scaling-*-s{seed}")):
        if (path / "report.json").is_file():
            return find(str(path))
    return None


def run(folder: Path, seed: int, args: argparse.Namespace) -> RunDir:
    """Run a seed to its end."""
    number = len(list(folder.glob(f"scaling-*-s{seed}")))
    id = f"scaling-{number}-s{seed}"
    changes = {
        "run.seed": seed, "run.id": id, "run.dir": str(folder), "environment.backend": "process",
        "curriculum.steps": args.steps, "evaluation.every": args.every, "evaluation.every_tasks": args.tasks,
        "evaluation.heldout_tasks": args.tasks, "evaluation.unseen_tasks": 0, "production.simulate": "false",
    }  # fmt: skip
    command = [sys.executable, "-m", "headrace.cli", "up", args.config]
    for entry in (*(f"{key}={value}" for key, value in changes.items()), *args.set):
        command += ["--set", entry]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(
            f"the run {id} ended with code {done.returncode}; its folder keeps the logs, and a new start runs it anew"
        )
    return find(str(folder / id))


async def points_of(own: RunDir) -> list[Point]:
    """Version 0 and every version that was measured, with the tokens of the steps that made it."""
    report = json.loads((own.path / "report.json").read_text())
    rates = {0: report["heldout_before"]} if report["heldout_before"] is not None else {}
    rates |= {point["version"]: point["rate"] for point in report["curve"] if point["suite"] == SUITE}
    steps: dict[int, int] = {}
    async with bus_of(own, "replay") as bus:
        async for received in bus.history("HR_STEP", STEP.at(run=own.id)):
            if isinstance(done := received.message, StepDone):
                steps[done.version] = done.tokens
    active = active_parameters(own)
    points = []
    for version, rate in sorted(rates.items()):
        tokens = sum(count for made, count in steps.items() if made <= version)
        points.append(Point(version, tokens, 6.0 * active * tokens, rate))
    return points


def active_parameters(own: RunDir) -> int:
    """Parameters that one token uses, without the embedding."""
    config = from_section(load(own.config).policy)
    attention = config.dim * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    width = config.expert_dim * (config.top_k if config.experts else 1)
    return (
        config.layers * (attention + 3 * config.dim * width + config.dim * config.experts) + config.dim * config.vocab
    )


def main() -> None:
    """Run what is missing, then print points, fits and residuals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--config", default="deploy/demo.toml", help="the recipe")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between two points")
    parser.add_argument("--tasks", type=int, default=120, help="held-out tasks of a point")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another key of the recipe")
    parser.add_argument("--only-fit", action="store_true", help="run nothing: fit the seeds whose runs have ended")
    args = parser.parse_args()
    figures: Figures = {}
    every: list[Point] = []
    slopes: list[float] = []
    fewest = math.inf
    seeds = list(map(int, args.seeds.split(",")))
    for seed in seeds:
        finished = ended(args.folder, seed)
        if finished is None and args.only_fit:
            continue
        points = uvloop.run(points_of(finished or run(args.folder, seed, args)))
        line = fitted(points)
        figures[f"points_{seed}"] = [
            {"version": each.version, "tokens": each.tokens, "flop": each.flop, "rate": each.rate} for each in points
        ]
        figures |= described(str(seed), line)
        every += points
        slopes.append(line.slope)
        fewest = min(fewest, len(line.residuals))
        print(json.dumps({"seed": seed, "points": figures[f"points_{seed}"], **described(str(seed), line)}), flush=True)
    if not slopes:
        sys.exit(f"no run of seeds {args.seeds} has ended in {args.folder}/")
    figures |= described("all", fitted(every)) | {"seeds_run": len(slopes), "points_fewest": fewest}
    targets = {
        "seeds_run": at_least(len(slopes), 3),
        "points_fewest": at_least(fewest, 5),
        "slope_min": at_least(round(min(slopes), 4), 0.05),
    }
    finish(figures, targets, "torch")


def described(name: str, line: Line) -> Figures:
    """The figures of a fit. slope: gain of the pass rate for ten times the compute."""
    return {
        f"slope_{name}": round(line.slope, 4),
        f"slope_error_{name}": None if line.slope_error is None else round(line.slope_error, 4),
        f"intercept_{name}": round(line.intercept, 4),
        f"residuals_{name}": [round(each, 4) for each in line.residuals],
        f"residual_max_{name}": round(max(map(abs, line.residuals)), 4),
        f"r2_{name}": None if line.r2 is None else round(line.r2, 4),
    }


if __name__ == "__main__":
    main()
