"""Combines the cells of `benchmarks.async_vs_sync`: means over seeds, ratios per seed, targets.

Busy is 1 - time blocked on input or credit / wall: the trainer is blocked while it waits for a batch, the rollout side
while no episode is in flight. Both are reported twice: over the whole run, and (`_within`) between the first step's end
and the last issue, because the first batch has no predecessor and the last ones no successor.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.cells import Cell, Seen, share
from benchmarks.conditions import Figures, at_least, at_most

BUSY = 0.95
SPEEDUP = 2.5
ENOUGH = 16
"""Attempts by which a version's reward is known."""


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, which is None for a single value."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def mean(found: Iterable[Seen], value: Callable[[Seen], float | None], digits: int = 3) -> float | None:
    """The mean over the cells that have a value."""
    values = [one for one in map(value, found) if one is not None]
    return round(statistics.fmean(values), digits) if values else None


def under_training(seen: Seen, what: Iterable[tuple[float, float]]) -> float:
    """Share of the trainer's computing time during which another activity of the run goes on."""
    return share(what, seen.training, sum(end - begin for begin, end in seen.training))


def summary(cells: dict[Cell, Seen]) -> Figures:
    """Figures by kind of cell, means over seeds."""
    figures: Figures = {}
    for waits in sorted({cell.waits for cell in cells}):
        mine = {cell: seen for cell, seen in cells.items() if cell.waits == waits}
        for bound in sorted({cell.bound for cell in mine}):
            runs = [seen for cell, seen in mine.items() if cell.bound == bound]
            name = f"{'waits' if waits else 'plain'}_{f'async{bound}' if bound else 'sync'}"
            walls = {c.seed: min(s.wall_s for d, s in mine.items() if d.seed == c.seed) for c in mine}
            equal = [seen.at_wall(walls[cell.seed]) for cell, seen in mine.items() if cell.bound == bound]
            reward, error = spread([seen.at_samples() for seen in runs])
            figures |= {
                f"{name}_runs": len(runs),
                f"{name}_trained_tokens_per_s": mean(runs, lambda seen: seen.tokens_per_s, 1),
                f"{name}_wall_s": mean(runs, lambda seen: seen.wall_s, 1),
                f"{name}_step_s": mean(runs, lambda seen: statistics.median(d.seconds for _, d in seen.steps), 3),
                f"{name}_trainer_busy_ratio": mean(runs, lambda seen: seen.trainer_busy),
                f"{name}_rollout_busy_ratio": mean(runs, lambda seen: seen.rollout_busy),
                f"{name}_trainer_busy_within_ratio": mean(runs, lambda seen: seen.trainer_busy_within()),
                f"{name}_rollout_busy_within_ratio": mean(runs, lambda seen: seen.rollout_busy_within()),
                f"{name}_episodes_in_flight": mean(runs, lambda seen: seen.in_flight(), 1),
                f"{name}_sampling_under_training_ratio": mean(runs, lambda seen: under_training(seen, seen.episodes)),
                f"{name}_weights_to_engine_s": mean(runs, weights_s),
                f"{name}_weights_under_training_ratio": mean(runs, weights_overlap),
                f"{name}_snapshot_write_s": mean(runs, lambda seen: statistics.median(seen.written_s), 4),
                f"{name}_dropped_ratio": round(sum(s.dropped for s in runs) / sum(s.issued for s in runs), 4),
                f"{name}_staleness_max_versions": max(done.staleness_max for seen in runs for _, done in seen.steps),
                f"{name}_reward_first": mean(runs, lambda seen: statistics.fmean(r for _, r in seen.rewards[:5])),
                f"{name}_reward_at_equal_samples_mean": round(reward, 4),
                f"{name}_reward_at_equal_samples_error": None if error is None else round(error, 4),
                f"{name}_reward_at_equal_wall_mean": round(statistics.fmean(equal), 4),
            }
    return figures


def weights_s(seen: Seen) -> float | None:
    """Median seconds from the snapshot file to the engine that serves the version."""
    return statistics.median(end - begin for begin, end in seen.weights) if seen.weights else None


def weights_overlap(seen: Seen) -> float | None:
    """Share of encoding, publishing, staging and swapping that goes on while the trainer computes a later step."""
    total = sum(end - begin for begin, end in seen.weights)
    return share(seen.weights, seen.training, total) if total > 0 else None


def ratios(cells: dict[Cell, Seen], bound: int, waits: bool) -> list[float]:
    """Trained tokens per second over synchronous, seed by seed."""
    return [
        cells[Cell(bound, waits, cell.seed)].tokens_per_s / seen.tokens_per_s
        for cell, seen in cells.items()
        if cell.bound == 0 and cell.waits == waits and Cell(bound, waits, cell.seed) in cells
    ]


def common(runs: Sequence[Seen], count: int = 5) -> list[int]:
    """The newest versions that wrote at least `ENOUGH` attempts in each run."""
    versions = (set(v for v, rewards in seen.sampled.items() if len(rewards) >= ENOUGH) for seen in runs)
    return sorted(set.intersection(*versions))[-count:]


def lost(cells: dict[Cell, Seen], waits: bool, bound: int = 2) -> tuple[float, float | None] | None:
    """Reward lost against synchronous training at equal samples: mean over the seeds of both kinds, and its error.

    Version v has trained on v batches on either side, so attempts that the same versions wrote are compared. Rewards of
    the same batches are not alike: an asynchronous batch was written by versions that are up to `bound` steps older.
    """
    kinds = [[seen for cell, seen in cells.items() if cell.waits == waits and cell.bound == b] for b in (0, bound)]
    if not all(kinds):
        return None
    newest = common([seen for kind in kinds for seen in kind])
    if not newest:
        return None
    sides = [[statistics.fmean(r for v in newest for r in seen.sampled[v]) for seen in kind] for kind in kinds]
    (sync, error), (other, more) = map(spread, sides)
    return sync - other, None if error is None or more is None else math.hypot(error, more)


def compared(figures: Figures, cells: dict[Cell, Seen], bounds: Iterable[int]) -> Figures:
    """Targets; speed-ups and lost rewards are added to the figures."""
    targets: Figures = {}
    for waits in sorted({cell.waits for cell in cells}):
        kind = "waits" if waits else "plain"
        for bound in bounds:
            speedups = ratios(cells, bound, waits)
            if bound and speedups:
                figures[f"{kind}_async{bound}_over_sync_ratio"] = round(statistics.fmean(speedups), 3)
                figures[f"{kind}_async{bound}_over_sync_ratio_by_seed"] = [round(value, 3) for value in speedups]
        cost = lost(cells, waits)
        if cost is not None:
            reward, error = cost
            figures[f"{kind}_reward_lost_at_bound_2"] = round(reward, 4)
            figures[f"{kind}_reward_lost_at_bound_2_error"] = None if error is None else round(error, 4)
            name = f"{kind}_reward_lost_in_standard_errors"
            targets[name] = at_most(round(reward / error, 2) if error else None, 2.0)
    heavy = {name: figures.get(f"waits_{name}") for name in ("async2_over_sync_ratio", "async2_dropped_ratio")}
    targets["waits_async2_over_sync_ratio"] = at_least(heavy["async2_over_sync_ratio"], SPEEDUP)
    targets["waits_async2_dropped_ratio"] = at_most(heavy["async2_dropped_ratio"], 0.05)
    targets["staleness_within_bound"] = at_most(
        max(done.staleness_max - cell.bound for cell, seen in cells.items() for _, done in seen.steps), 0
    )
    return targets


def pair(prefix: str, sync: Seen, other: Seen) -> Figures:
    """A pair of cells outside of the grid, one seed each."""
    figures: Figures = {f"{prefix}_steps": len(sync.steps)}
    for name, seen in (("sync", sync), ("async2", other)):
        figures |= {
            f"{prefix}_{name}_trained_tokens_per_s": round(seen.tokens_per_s, 1),
            f"{prefix}_{name}_wall_s": round(seen.wall_s, 1),
            f"{prefix}_{name}_step_s": mean([seen], lambda one: statistics.median(d.seconds for _, d in one.steps)),
            f"{prefix}_{name}_trainer_busy_ratio": round(seen.trainer_busy, 3),
            f"{prefix}_{name}_rollout_busy_ratio": round(seen.rollout_busy, 3),
            f"{prefix}_{name}_trainer_busy_within_ratio": mean([seen], lambda one: one.trainer_busy_within()),
            f"{prefix}_{name}_rollout_busy_within_ratio": mean([seen], lambda one: one.rollout_busy_within()),
            f"{prefix}_{name}_dropped_ratio": round(seen.dropped / seen.issued, 4),
            f"{prefix}_{name}_reward_at_equal_samples": round(seen.at_samples(), 4),
        }
    return figures | {f"{prefix}_async2_over_sync_ratio": round(other.tokens_per_s / sync.tokens_per_s, 3)}


def balance(name: str, seen: Seen) -> Figures:
    """Figures of how busy trainer and rollout side are."""
    return {
        f"{name}_trainer_busy_within_ratio": at_least(mean([seen], lambda one: one.trainer_busy_within()), BUSY),
        f"{name}_rollout_busy_within_ratio": at_least(mean([seen], lambda one: one.rollout_busy_within()), BUSY),
    }


def evaluated(seen: Seen, without: Seen | None) -> Figures:
    """The cell with an evaluation during training: the time of the evaluation, and the training speed meanwhile."""
    if not seen.evaluations:
        return {"evaluation_s": None}
    begin, end = seen.evaluations[0]
    figures: Figures = {
        "evaluation_s": round(end - begin, 2),
        "evaluation_under_training_ratio": round(share(seen.training, [(begin, end)], end - begin), 3),
        "evaluation_under_sampling_ratio": round(share(seen.episodes, [(begin, end)], end - begin), 3),
        "steps_during_evaluation": sum(begin < moment <= end for moment, _ in seen.steps),
    }
    if without is not None:
        figures["evaluation_wall_over_none_ratio"] = round(seen.wall_s / without.wall_s, 3)
    return figures
