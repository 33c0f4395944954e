"""Statistics by task: intervals that keep their level, and a comparison that is silent where nothing differs."""

import random

import pytest

from headrace.algorithms.paired import all_pass, paired_difference, share_interval, silent_share


def trials(rng: random.Random, rate: float, count: int = 5) -> float:
    return sum(rng.random() < rate for _ in range(count)) / count


def test_the_intervals_keep_their_level_when_trials_of_a_task_resemble_each_other() -> None:
    rng = random.Random(1)
    held = held_pairs = 0
    for _ in range(400):
        rates = [rng.betavariate(0.6, 0.6) for _ in range(60)]  # tasks differ far more than trials do
        interval = share_interval([trials(rng, rate) for rate in rates])
        held += interval.low <= 0.5 <= interval.high
        better = {str(n): trials(rng, min(1.0, rate + 0.1)) for n, rate in enumerate(rates)}
        worse = {str(n): trials(rng, rate) for n, rate in enumerate(rates)}
        gain = sum(min(1.0, rate + 0.1) - rate for rate in rates) / 60
        pair = paired_difference(worse, better)
        held_pairs += pair.low <= gain <= pair.high
    assert held >= 0.93 * 400 and held_pairs >= 0.93 * 400


def test_a_difference_of_the_detectable_size_is_found_four_times_in_five() -> None:
    rng = random.Random(2)
    rates = [rng.random() * 0.6 for _ in range(200)]
    first = {str(n): trials(rng, rate) for n, rate in enumerate(rates)}
    size = paired_difference(first, {str(n): trials(rng, rate) for n, rate in enumerate(rates)}).detectable
    detections = 0
    for _ in range(100):
        pair = paired_difference(
            {str(n): trials(rng, rate) for n, rate in enumerate(rates)},
            {str(n): trials(rng, rate + size) for n, rate in enumerate(rates)},
        )
        detections += not pair.silent
    assert 0.02 < size < 0.1 and 65 <= detections <= 95


def test_a_policy_compared_with_itself_is_silent_in_95_of_100_resamples() -> None:
    rng = random.Random(3)
    mixed = {str(n): [rng.random() < rate for _ in range(5)] for n, rate in enumerate(rng.random() for _ in range(60))}
    assert silent_share(mixed, 400, seed=1) >= 0.95
    assert silent_share({"a": [True], "b": [False]}, 50, seed=1) == 1.0


@pytest.mark.parametrize(("won", "lost", "tasks", "passes"), [(10, 0, 20, True), (0, 0, 20, False), (2, 0, 4, False)])
def test_the_paired_bound_needs_more_than_a_few_tasks(won: int, lost: int, tasks: int, passes: bool) -> None:
    first = {str(task): float(won <= task < won + lost) for task in range(tasks)}
    difference = paired_difference(first, {str(task): float(task < won) for task in range(tasks)})
    assert (difference.low > 0.0, difference.won, difference.lost) == (passes, won, lost)


def test_without_tasks_nothing_is_shown() -> None:
    assert (paired_difference({"a": 1.0}, {"b": 1.0}).low, share_interval([]).high) == (-1.0, 1.0)
    everything = share_interval([1.0] * 20)
    assert everything.mean == 1.0 and 0.7 < everything.low < 0.9, "all tasks passed is not certainty"


def test_all_of_k_trials_pass() -> None:
    assert (all_pass(5, 5, 5), all_pass(4, 5, 5), all_pass(4, 5, 2)) == (1.0, 0.0, 0.6)
    with pytest.raises(ValueError, match="expected 1 <= k <= 5"):
        all_pass(1, 5, 6)
