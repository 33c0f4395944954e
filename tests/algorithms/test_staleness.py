import random

import pytest

from headrace.algorithms.staleness import (
    Bounds,
    batch_of,
    credit,
    first_batch_of,
    histogram,
    may_close,
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
    assert [Bounds.constant(1).min_version(i, 2) for i in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [Bounds.constant(0).min_version(i, 2) for i in range(6)] == [0, 0, 1, 1, 2, 2]


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


def test_a_larger_bound_grows_by_one_a_batch_and_a_smaller_one_holds_at_once() -> None:
    bounds = Bounds.constant(1).changed(5, 4).changed(12, 0).changed(14, 2).changed(15, 1)
    assert [bounds.at(batch) for batch in range(18)] == [1, 1, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 0, 0, 0, 1, 1, 1]
    assert bounds.min_version(10, 2) == 4  # batch 5 may go back to 4, and so may 6, 7 and 8
    assert [bounds.min_version(2 * batch, 2) for batch in (6, 7, 8, 9, 12)] == [4, 4, 4, 5, 12]
    assert [bounds.last_batch(version) for version in (0, 3, 4, 5, 11, 12, 15)] == [1, 4, 8, 9, 11, 12, 16]
    with pytest.raises(ValueError, match="from batch 15 or a later one on, got 3 from batch 14"):
        bounds.changed(14, 3)
    with pytest.raises(ValueError, match="got -1"):
        bounds.changed(20, -1)


def test_a_change_before_the_last_one_has_grown() -> None:
    assert [Bounds.constant(0).changed(2, 5).changed(4, 3).at(k) for k in range(8)] == [0, 0, 0, 1, 2, 3, 3, 3]
    assert [Bounds.constant(2).changed(3, 0).changed(3, 2).at(k) for k in range(7)] == [2, 2, 2, 0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_changes_last_batches_are_those_that_are_allowed_and_versions_are_still_kept(seed: int) -> None:
    draw = random.Random(seed)
    bounds, batch = Bounds.constant(draw.randint(0, 3)), 0
    for _ in range(5):
        batch += draw.randint(0, 4)
        bounds = bounds.changed(batch, draw.randint(0, 5))
    for version in range(30):
        allowed = [k for k in range(version, version + 12) if k - version <= bounds.at(k)]
        assert bounds.last_batch(version) == allowed[-1]
        assert allowed == list(range(version, allowed[-1] + 1))
    kept_versions = {0}
    for k in range(30):  # what a trainer keeps after batch k, which knows the bounds of k and k + 1
        assert set(range(max(0, k - bounds.at(k)), k + 1)) <= kept_versions
        oldest = k + 1 - max(bounds.at(k), bounds.at(k + 1))
        kept_versions = {version for version in {*kept_versions, k + 1} if version >= oldest}


def test_the_first_batch_of_a_change() -> None:
    two = Bounds.constant(2)
    assert first_batch_of(two, 3, closed=5, index=11, groups_per_step=2, drop=False) == 3
    assert first_batch_of(two, 1, closed=5, index=11, groups_per_step=2, drop=True) == 3
    assert first_batch_of(two, 1, closed=5, index=11, groups_per_step=2, drop=False) == 6, "issued under the old one"
    assert first_batch_of(two.changed(9, 1), 3, closed=4, index=4, groups_per_step=2, drop=False) == 9


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_holds_whatever_finishes_first(seed: int) -> None:
    """Credit and may_close keep every token within the bound, lose no group, and never wedge."""
    draw, size, bound = random.Random(seed), 4, seed % 4
    issued = retired = version = 0
    live: list[int] = []
    closed: list[int] = []
    for _ in range(3000):
        for _ in range(draw.randint(0, credit(issued, retired, size, bound))):
            assert Bounds.constant(bound).min_version(issued, size) <= version
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
    assert histogram(5, {5: 3, 4: 2}) == {"0": 3, "1": 2}
    with pytest.raises(ValueError, match="got version"):
        histogram(5, {6: 1})
