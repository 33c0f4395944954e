import random

import pytest

from headrace.algorithms.staleness import (
    batch_of,
    credit,
    histogram,
    may_close,
    min_version,
    places,
    staleness,
)


def test_credit_by_hand() -> None:
    assert credit(0, 0, 8, 1) == 16
    assert credit(16, 0, 8, 1) == 0
    assert credit(16, 8, 8, 1) == 8
    assert credit(8, 0, 8, 0) == 0
    with pytest.raises(ValueError, match="retired"):
        credit(3, 4, 8, 1)


def test_min_version_by_hand() -> None:
    assert [min_version(i, 2, 1) for i in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [min_version(i, 2, 0) for i in range(6)] == [0, 0, 1, 1, 2, 2]


def test_places_and_batches_agree() -> None:
    for batch in range(5):
        assert all(batch_of(place, 3) == batch for place in places(batch, 3))
    assert list(places(2, 3)) == [6, 7, 8]


def test_closing_leaves_room_for_the_older() -> None:
    assert may_close(3, [3], closed=6, groups_per_step=2, bound=0)
    assert not may_close(3, [3, 3], closed=6, groups_per_step=2, bound=0)  # one of the two others would be too old
    assert not may_close(1, [], closed=6, groups_per_step=2, bound=1)  # it is itself
    # Batch 2 is open. Two groups of version 1 must be in batch 3 at the latest, as must the two of version 0 in 2.
    assert may_close(2, [1, 1], closed=4, groups_per_step=2, bound=2)
    assert not may_close(2, [0, 0], closed=4, groups_per_step=2, bound=2)
    assert not may_close(2, [1, 1, 1, 1], closed=4, groups_per_step=2, bound=2)


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_holds_whatever_finishes_first(seed: int) -> None:
    """Credit and may_close keep every token within the bound, lose no group, and never wedge."""
    draw, size, bound = random.Random(seed), 4, seed % 4
    issued = retired = version = 0
    live: list[int] = []
    closed: list[int] = []
    for _ in range(3000):
        for _ in range(draw.randint(0, credit(issued, retired, size, bound))):
            assert min_version(issued, size, bound) <= version
            live.append(version)
            issued += 1
        draw.shuffle(live)
        for place, oldest in enumerate(live):
            if may_close(oldest, live[:place] + live[place + 1 :], len(closed), size, bound):
                closed.append(live.pop(place))
                break
        else:
            assert len(live) == 0 or issued - retired < (bound + 1) * size
        if len(closed) >= (version + 1) * size and draw.random() < 0.5:
            assert all(staleness(version, closed[place]) <= bound for place in places(version, size))
            retired += size
            version += 1
    assert version > 100


def test_histogram_counts_tokens_by_age() -> None:
    assert histogram(5, [5, 4, 5, 5, 4]) == {"0": 3, "1": 2}
    with pytest.raises(ValueError, match="cannot have written"):
        histogram(5, [6])
