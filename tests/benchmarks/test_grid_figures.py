"""Reward at equal samples: versions that trained on the same number of batches are compared, not batches."""

import pytest

from benchmarks.cells import Cell, Seen
from benchmarks.grid_figures import common, lost


def seen(sampled: dict[int, list[float]]) -> Seen:
    return Seen(
        wall_s=1.0, tokens_per_s=1.0, trainer_busy=1.0, rollout_busy=1.0, issued=1, dropped=0, balanced=True,
        failed_steps=[], steps=[], by_length={}, sampled=sampled,
    )  # fmt: skip


def learns(versions: int, less: float = 0.0) -> dict[int, list[float]]:
    """A reward that grows by 0.02 a version, over 20 attempts of each."""
    return {version: [0.02 * version - less] * 20 for version in range(versions)}


def cost_of(cells: dict[Cell, Seen]) -> tuple[float, ...]:
    cost = lost(cells, False)
    assert cost is not None and cost[1] is not None
    return cost[0], cost[1]


def test_versions_that_only_one_side_sampled_are_not_compared() -> None:
    sync, behind = seen(learns(24)), seen(learns(22) | {22: [0.0] * 3})
    assert common([sync, behind]) == [17, 18, 19, 20, 21]
    cells = {Cell(bound, False, seed): (behind if bound else sync) for bound in (0, 2) for seed in (1, 2)}
    assert cost_of(cells) == pytest.approx((0.0, 0.0))
    assert lost(cells, True) is None


def test_a_policy_that_learnt_less_from_as_many_samples_is_told() -> None:
    cells = {Cell(0, False, seed): seen(learns(24)) for seed in (1, 2)}
    cells |= {Cell(2, False, seed): seen(learns(22, less=0.03 * seed)) for seed in (1, 2)}
    assert cost_of(cells) == pytest.approx((0.045, 0.015))
