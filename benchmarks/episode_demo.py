"""Compares what an episode costs in a run of the demo with what it costs in `benchmarks.episode`, in one run.

    python -m benchmarks.episode_demo [--runs 1] [--steps 4] [--tokens 1000000]

The two alternate, because processor time differs between hours of a shared machine: groups of eight as in
`benchmarks.episode`, a short run of deploy/demo.toml, groups of eight again, and so on. A run has the demo's integrity
looks, second verdicts, learning, users and evaluations, in the demo's proportions; its own report.json is the source of
its figures. The ratio is that of the report's CPU-ms of virtual machines per episode to the benchmark's in groups.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.conditions import Figures, at_least, at_most, cannot_run, finish
from benchmarks.episode import GROUP, measure
from headrace.config import Environment
from headrace.vmhost.errors import VmhostError

CONFIG = "deploy/demo.toml"
STEPS, HELD_OUT, UNSEEN = 40, 200, 48
"""Of the demo; a short run has the same proportions."""


def demo(folder: str, steps: int, tokens: int) -> dict[str, Any]:
    """The report of a short run."""
    run = f"cost-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = {
        "run.dir": folder,
        "run.id": run,
        "run.min_free_mb": 64,
        "mid_training.tokens": tokens,
        "curriculum.steps": steps,
        "evaluation.heldout_tasks": max(1, HELD_OUT * steps // STEPS),
        "evaluation.unseen_tasks": max(1, UNSEEN * steps // STEPS),
    }
    command = [sys.executable, "-m", "headrace.cli", "up", CONFIG]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode == 3:
        cannot_run("this machine can't run microVMs; `headrace vm doctor` says why")
    if done.returncode:
        sys.exit(f"the run ended with code {done.returncode}")
    report: dict[str, Any] = json.loads((Path(folder) / run / "report.json").read_text())
    return report


def main() -> None:
    """Measure both, alternately."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episode_demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="training steps of a run")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of mid-training of a run")
    parser.add_argument("--groups", type=int, default=6, help="groups of eight per measurement of the benchmark")
    args = parser.parse_args()
    environment = Environment(warm_most=1)
    bench: list[float] = []
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="episode-demo-") as folder:
        try:
            bench.append(uvloop.run(measure(environment, "group", args.groups, GROUP)).cpu)
            for _ in range(args.runs):
                reports.append(demo(folder, args.steps, args.tokens))
                bench.append(uvloop.run(measure(environment, "group", args.groups, GROUP)).cpu)
        except VmhostError as error:
            cannot_run(str(error))
    costs = [float(report["cpu_ms_per_episode"]) for report in reports]
    spent: Counter[str] = Counter()
    scored: Counter[str] = Counter()
    for report in reports:
        spent.update(report["vm_cpu_s"])
        scored.update({lane: figures["scored"] for lane, figures in report["ledger"]["lanes"].items()})
    ratio = statistics.median(costs) / statistics.median(bench)
    figures: Figures = {
        "bench_group_cpu_ms_per_episode": [round(cost, 1) for cost in bench],
        "demo_cpu_ms_per_episode": costs,
        "demo_over_bench_ratio": round(ratio, 2),
        "demo_vm_cpu_s": {name: round(seconds, 1) for name, seconds in spent.items()},
        "demo_episodes": dict(scored),
        "demo_vm_clones": sum(report["vm_clones"] for report in reports),
        "demo_cpu_ms_per_scored_episode": {
            lane: round(1000 * (spent[f"{lane} rollout"] + spent[f"{lane} judge"]) / count, 1)
            for lane, count in scored.items()
            if count
        },
        "demo_time_s": [report["time"] for report in reports],
        "steps": args.steps,
    }
    balanced = all(report["ledger"]["balanced"] for report in reports)
    finish(figures, {"ratio": at_most(ratio, 1.5), "balanced": at_least(float(balanced), 1.0)}, "torch")


if __name__ == "__main__":
    main()
