"""Does a price of effort change how a policy works? Behaviour before and after reinforcement, with all tools enabled.

    python -m benchmarks.behaviour [--seeds 1,2,3] [--folder runs] [--set KEY=VALUE ...] [--only-read]

The recipe is deploy/behaviour.toml: every tool of a default task but the terminal's sessions, traces that look around
before they edit, and `[algorithm] length_penalty`. One mid-training (seed 1) makes the policy; each seed is then a
whole run of `headrace up` from that policy, on the process backend, which is **not isolated**. A run that has ended in
`--folder` is read and not run again; one that was interrupted starts anew under another number.

Before and after: the held-out tasks at temperature 1, with version 0 and with the last version. Per attempt: calls per
turn that has a call, reads and searches before the first edit that succeeded (of all turns where there is none),
sampled tokens, turns, calls, whether the tests ran after the last edit. The interval of a change is a bootstrap over
tasks; a task's change is the mean over the seeds where they are taken together. `curve_N` is the behaviour of training
attempts by step, as StepDone publishes it.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import uvloop

from benchmarks.conditions import Figures, at_least, cannot_run, finish
from headrace.bench.behaviour import acts_of
from headrace.launch.runs import RunDir, find
from headrace.launch.session import bus_of
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import STEP, TRAJ
from headrace.messages.training import StepDone
from headrace.search.models import INSTALL
from headrace.search.models import find as search_model

Values = dict[str, float]
"""Figure to value: of one attempt, or the mean over attempts."""


def values_of(trajectory: Trajectory) -> Values:
    """The figures of one attempt."""
    acts = acts_of(trajectory.turns)
    return {
        "calls_per_turn": acts.calls / max(1, acts.calling_turns),
        "reads_before_edit": float(acts.reads_before_edit),
        "tokens": float(sum(len(turn.ids) for turn in trajectory.turns)),
        "turns": float(len(trajectory.turns)),
        "calls": float(acts.calls),
        "tested": float(acts.tested),
    }


def change(before: Mapping[str, float], after: Mapping[str, float], draws: int = 10_000) -> tuple[float, float, float]:
    """The mean change over the tasks that both have, and its 95 % interval by bootstrap over tasks."""
    tasks = sorted(set(before) & set(after))
    gains = np.array([after[task] - before[task] for task in tasks])
    means = gains[np.random.default_rng(1).integers(0, len(gains), (draws, len(gains)))].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(gains.mean()), float(low), float(high)


class Seed(msgspec.Struct, frozen=True):
    """The figures of one seed's run."""

    before: dict[str, Values]
    """Task to the figures of its attempt."""
    after: dict[str, Values]
    tools: tuple[dict[str, float], dict[str, float]]
    """Tool to calls per attempt, before and after."""
    curve: list[dict[str, float]]
    passed: tuple[float, float]


async def read(own: RunDir) -> Seed:
    """The attempts of the evaluations at temperature 1, and the steps."""
    report = json.loads((own.path / "report.json").read_text())
    sides: tuple[dict[str, Trajectory], dict[str, Trajectory]] = {}, {}
    curve: list[dict[str, float]] = []
    async with bus_of(own, "replay") as bus:
        async for received in bus.history("HR_TRAJ", TRAJ.where(run=own.id)):
            made = received.message
            if made.lane == "eval" and made.sampling.temperature == 1.0:
                sides[made.policy.version > 0][made.task.task] = made
        async for received in bus.history("HR_STEP", STEP.at(run=own.id)):
            if isinstance(done := received.message, StepDone) and done.behaviour is not None:
                curve.append(
                    {"step": done.step, "pass_rate": round(done.pass_rate, 4)} | msgspec.to_builtins(done.behaviour)
                )
    tools = (calls_by_tool(sides[0].values()), calls_by_tool(sides[1].values()))
    before, after = ({task: values_of(made) for task, made in side.items()} for side in sides)
    return Seed(before, after, tools, curve, (report["heldout_before"], report["heldout_after_t1"]))


def calls_by_tool(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Calls of each tool per attempt; a broken call counts under the name that it gives."""
    counted = list(attempts)
    counts = Counter(call.name or "(none)" for each in counted for turn in each.turns for call in turn.calls)
    return {name: round(count / len(counted), 3) for name, count in counts.most_common()}


def means(rows: Iterable[Values]) -> Values:
    """The mean of each figure."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
    return {name: round(fmean(column), 3) for name, column in columns.items()}


def changes(seeds: Sequence[Seed]) -> dict[str, list[float]]:
    """Figure to (change, low, high). A task's value is its mean over the seeds."""
    tasks = sorted(set.intersection(*(set(each.before) & set(each.after) for each in seeds)))

    def column(name: str, side: str) -> dict[str, float]:
        return {task: fmean(getattr(each, side)[task][name] for each in seeds) for task in tasks}

    names = next(iter(seeds[0].before.values()))
    return {name: [round(v, 3) for v in change(column(name, "before"), column(name, "after"))] for name in names}


def up(folder: Path, name: str, args: argparse.Namespace, **more: object) -> RunDir:
    """Run the recipe to its end, unless such a run has ended already."""
    for path in sorted(folder.glob(f"{name}-*")):
        if (path / "report.json").is_file():
            return find(str(path))
    if args.only_read:
        sys.exit(f"no run {name} has ended in {folder}/")
    id = f"{name}-{len(list(folder.glob(f'{name}-*')))}"
    keys = {"run.id": id, "run.dir": str(folder), "environment.backend": "process", **more}
    command = [sys.executable, "-m", "headrace.cli", "up", args.config]
    for entry in (*(f"{key}={value}" for key, value in keys.items()), *args.set):
        command += ["--set", entry]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(f"the run {id} ended with code {code}; its folder keeps the logs, and a new start runs it anew")
    return find(str(folder / id))


def warm_start(args: argparse.Namespace) -> Path:
    """The folder of the mid-trained policy: version 0 of a run of one small step."""
    folder: Path = args.folder / "behaviour-policy"
    if not (folder / "config.json").is_file():
        small = {"curriculum.steps": 1, "curriculum.groups_per_step": 1, "curriculum.group_size": 2}
        quiet = {"evaluation.heldout_tasks": 0, "evaluation.before": "false", "evaluation.after": "false"}
        base_run = up(args.folder, "behaviour-base", args, **small, **quiet)
        export = [sys.executable, "-m", "headrace.cli", "export", str(base_run.path), str(folder), "--version", "0"]
        subprocess.run(export, check=True)
    return folder


def main() -> None:
    """Run what is missing, then print what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--config", default="deploy/behaviour.toml", help="the recipe")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another key of the recipe")
    parser.add_argument("--only-read", action="store_true", help="run nothing: read the seeds whose runs have ended")
    args = parser.parse_args()
    if search_model("auto") is None:
        cannot_run(f"no embedding model: {INSTALL}")
    policy = warm_start(args)
    figures: Figures = {}
    seeds: list[Seed] = []
    for seed in map(int, args.seeds.split(",")):
        start = {
            "run.seed": seed,
            "policy.checkpoint": str(policy),
            "policy.renderer": "terse",
            "mid_training.tokens": 0,
        }
        one = uvloop.run(read(up(args.folder, f"behaviour-s{seed}", args, **start)))
        seeds.append(one)
        figures |= {
            f"passed_{seed}": one.passed,
            f"before_{seed}": means(one.before.values()),
            f"after_{seed}": means(one.after.values()),
            f"change_{seed}": changes([one]),
            f"tools_{seed}": one.tools,
            f"curve_{seed}": one.curve,
        }
        print(json.dumps({"seed": seed, **figures}), file=sys.stderr, flush=True)
    figures |= {"seeds_run": len(seeds), "tasks": len(seeds[0].after), "backend": "process", "isolated": False}
    figures["change_all"] = changes(seeds)
    finish(figures, {"seeds_run": at_least(len(seeds), 3)}, "torch")


if __name__ == "__main__":
    main()
