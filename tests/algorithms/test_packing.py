import random

import pytest

from headrace.algorithms.packing import pack


def test_first_fit_decreasing_by_hand() -> None:
    # 7 -> A; 6 -> B; 4 -> B (10); 3 -> A (10); 2, 2 -> C
    assert pack([4, 7, 2, 6, 3, 2], 10) == [[0, 3], [1, 4], [2, 5]]


def test_everything_once_and_within_the_budget() -> None:
    draw = random.Random(3)
    lengths = [draw.randint(1, 90) for _ in range(200)]
    batches = pack(lengths, 256)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(sum(lengths[index] for index in batch) <= 256 for batch in batches)
    assert len(batches) <= 11 / 9 * (sum(lengths) / 256 + 1) + 1


def test_ties_go_by_index() -> None:
    assert pack([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]


def test_a_giant_stands_alone() -> None:
    assert pack([300, 1, 2], 256) == [[0], [1, 2]]


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 10) == []


def test_refuses_empty_sequences_and_budgets() -> None:
    with pytest.raises(ValueError, match="budget"):
        pack([1], 0)
    with pytest.raises(ValueError, match="at least one token"):
        pack([3, 0], 10)
