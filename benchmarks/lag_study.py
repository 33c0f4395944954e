"""Compares corrections for a policy whose samples are four versions old, at a high learning rate.

    python -m benchmarks.lag_study [--lag 4] [--learning-rate 2e-3] [--seeds 1,2,3] [--arms truncated,masked,...]

Every arm is a whole `headrace up` from one mid-trained policy, in the `process` backend, because the study compares
objectives and not sandboxes. The trainer runs in this process and waits: it takes a batch only when everything that may
be sampled before it is sampled. With a staleness bound of `lag` the groups of batch b are issued at step b - lag and
sampled at once by the current version, the oldest that is admitted: every token of every batch is exactly `lag`
versions old.

An arm has collapsed when the mean reward of its last five batches is below half of its best five in a row. k1 warns of
it: `warned_steps_before` is the number of steps between the first batch with k1 above 0.05 and the first five batches
whose mean reward is below half of the best before them. The arm `no_lag` has the same policy, seeds and learning rate
without a lag: a collapse there is not caused by the lag.

A run that is kept in --dir is not run again.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import tiny_run
from benchmarks.cells import Cell, Seen, beside, prepare, settings, whole_run
from benchmarks.conditions import Figures, arguments, at_least, finish, scratch
from headrace.actors.trainer.actor import OnRecord, Trainer
from headrace.actors.trainer.closings import Batch
from headrace.messages.subjects import SCORE
from headrace.training.trainer import PolicyTrainer

GROUPS = (
    '[["curriculum","evaluator","dead_letter"],["judge"],["environment"],["rollout"],'
    '["weight_sender","weight_receiver"]]'
)
WARNING_K1 = 0.05
NO_LAG = "no_lag"
ARMS: dict[str, tuple[str, ...]] = {
    NO_LAG: (),
    "truncated": (),
    "masked": ("algorithm.weighting=masked",),
    "clipped": ("algorithm.weighting=clipped",),
    "decoupled": ("algorithm.weighting=decoupled", "algorithm.minibatches=2"),
    "sequence": ("algorithm.weighting=sequence",),
    "sequence_masked": ("algorithm.weighting=sequence_masked",),
    "guarded": (f"algorithm.guard_k1={WARNING_K1}",),
}
"""Overrides of an arm; `guarded` is truncated under the guard of headrace/training/guard.py, `no_lag` has no lag."""


class Patient(Trainer):
    """A trainer that waits until everything that its staleness bound admits is sampled."""

    async def start(self) -> None:
        """Count verdicts as well."""
        self._scored: set[tuple[str, int]] = set()
        self._more = asyncio.Event()
        self.spawn(self._count(), "counting")
        await super().start()

    async def _count(self) -> None:
        async for received in self.bus.follow("HR_SCORE", SCORE.where(run=self.run)):
            self._scored.add((received.message.group, received.message.slot))
            self._more.set()

    async def _batch(self, trainer: PolicyTrainer, on_record: OnRecord | None) -> Batch:
        curriculum = self.config.curriculum
        batches = min(trainer.version + 1 + curriculum.staleness, curriculum.steps)
        with self.waiting():
            while len(self._scored) < batches * curriculum.groups_per_step * curriculum.group_size:
                self._more.clear()
                await self._more.wait()
        return await super()._batch(trainer, on_record)


def best(rewards: list[float], width: int = 5) -> float:
    """The largest mean of `count` consecutive batches."""
    return max(statistics.fmean(rewards[at : at + width]) for at in range(max(1, len(rewards) - width + 1)))


def fell(seen: Seen, width: int = 5) -> int | None:
    """The step after which the reward is below half of the best before, None when it never is."""
    rewards = [done.reward_mean for _, done in seen.steps]
    for at in range(width, len(rewards) - width + 1):
        if statistics.fmean(rewards[at : at + width]) < 0.5 * best(rewards[: at + width], width):
            return seen.steps[at][1].step
    return None


def warned(seen: Seen) -> int | None:
    """The first step whose batch had a k1 above the warning, None when none had."""
    return next((done.step for _, done in seen.steps if done.k1 > WARNING_K1), None)


def told(seen: Seen, steps: int) -> Figures:
    """The result of one run."""
    rewards = [done.reward_mean for _, done in seen.steps]
    fall, warning = fell(seen), warned(seen)
    last = statistics.fmean(rewards[-5:])
    marks = [step for step in range(9, steps, 10)]
    by_step = {done.step: done for _, done in seen.steps}
    return {
        "collapsed": last < 0.5 * best(rewards),
        "reward_last": round(last, 4),
        "reward_best": round(best(rewards), 4),
        "reward_at": {str(mark + 1): round(by_step[mark].reward_mean, 3) for mark in marks if mark in by_step},
        "fell_at": fall,
        "warned_at": warning,
        "warned_steps_before": fall - warning if fall is not None and warning is not None else None,
        "k1_max": round(max(done.k1 for _, done in seen.steps), 4),
        "k1_at": {str(mark + 1): round(by_step[mark].k1, 4) for mark in marks if mark in by_step},
        "staleness": sorted({age for _, done in seen.steps for age in done.staleness}),
        "rolled_back": [failed.step for failed in seen.failed_steps if failed.restored >= 0],
        "failed_steps": len(seen.failed_steps),
        "balanced": seen.balanced,
    }


def settings_of_call() -> argparse.Namespace:
    """The study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3_300_000, help="of mid-training, once")
    parser.add_argument("--credit", type=int, default=320)
    parser.add_argument("--max-vms", type=int, default=52)
    parser.add_argument("--limit-s", type=float, default=1800.0)
    parser.add_argument("--dir", default="")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--kept", action="store_true", help="run nothing: print the results that are stored in --dir")
    parser.add_argument("--trainer", default="", help=argparse.SUPPRESS)
    return arguments(
        parser,
        arms=NO_LAG,
        seeds="1",
        steps=1,
        groups=1,
        group_size=2,
        tokens=4000,
        set=tiny_run.settings("trainer"),
        dir=scratch(),
    )


def main() -> None:
    """All arms of a seed, then the next seed."""
    args = settings_of_call()
    if args.trainer:
        sys.exit(uvloop.run(beside(Path(args.trainer), [Patient])))
    unknown = set(args.arms.split(",")) - set(ARMS)
    if unknown:
        sys.exit(f"there is no arm {sorted(unknown)[0]!r}; there are {', '.join(ARMS)}")
    root = Path(args.dir or f"runs/lag_study-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    root.mkdir(parents=True, exist_ok=True)
    args.backend = "process"
    start = prepare(args, root)
    runs: dict[str, Any] = {}
    for seed in map(int, args.seeds.split(",")):
        for arm in args.arms.split(","):
            folder = root / f"{arm.replace('_', '-')}-s{seed}"
            study_settings = [
                f"run.id={folder.name}",
                f"processes.groups={GROUPS}",
                f"algorithm.learning_rate={args.learning_rate}",
            ]
            lag = 0 if arm == NO_LAG else args.lag
            overrides = [*settings(args, Cell(lag, False, seed), root), *study_settings, *ARMS[arm]]
            helper = ["benchmarks.lag_study", "--trainer", str(folder)]
            if args.kept and not folder.with_suffix(".seen").exists():
                continue
            seen = whole_run(folder, start, overrides, helper, {}, args.limit_s)
            runs[folder.name] = told(seen, args.steps)
            print(f"{folder.name}: {runs[folder.name]}", file=sys.stderr, flush=True)
    named = {arm: f"{arm.replace('_', '-')}-s" for arm in args.arms.split(",")}
    mine = {arm: [run for name, run in runs.items() if name.startswith(head)] for arm, head in named.items()}
    mine = {arm: arm_runs for arm, arm_runs in mine.items() if arm_runs}
    held = {arm: sum(not run["collapsed"] for run in arm_runs) for arm, arm_runs in mine.items()}
    best_held, count = max(
        ((held[arm], len(arm_runs)) for arm, arm_runs in mine.items() if arm not in (NO_LAG, "truncated", "guarded")),
        default=(None, 1),
    )
    figures: Figures = {
        "backend": "process",
        "isolated": False,
        "lag_versions": args.lag,
        "learning_rate": args.learning_rate,
        "steps": args.steps,
        "seeds": args.seeds,
        "arms_runs": {arm: len(arm_runs) for arm, arm_runs in mine.items()},
        "held_runs": held,
        "reward_last_mean": {
            arm: round(statistics.fmean(run["reward_last"] for run in arm_runs), 4) for arm, arm_runs in mine.items()
        },
        "k1_max": {arm: max(run["k1_max"] for run in arm_runs) for arm, arm_runs in mine.items()},
        "warned_steps_before": {
            arm: [run["warned_steps_before"] for run in arm_runs] for arm, arm_runs in mine.items()
        },
        "rollbacks": {arm: sum(len(run["rolled_back"]) for run in arm_runs) for arm, arm_runs in mine.items()},
        "runs": runs,
    }
    targets: Figures = {"runs_held_by_the_best_correction": at_least(best_held, count)}
    if "guarded" in mine:
        targets["runs_held_by_the_guard"] = at_least(held["guarded"], len(mine["guarded"]))
        targets["rollbacks_of_the_guard"] = at_least(figures["rollbacks"]["guarded"], 1)
    finish(figures, targets, "torch", "nats-py")


if __name__ == "__main__":
    main()
