"""Drops by length: by hand, and that long ones cannot hide."""

from headrace.ledger.drops import Bucket, DropsByLength, Fate, bucketed, by_length, edges


def test_edges_are_quantiles_by_nearest_rank() -> None:
    assert edges([8, 1, 5, 3, 2, 7, 4, 6]) == [2, 4, 6, 8]
    assert edges([5, 5, 5, 9]) == [5, 9]
    assert edges([3]) == [3]
    assert edges([]) == []


def test_every_slot_is_in_one_bucket() -> None:
    lengths = [float(n * n % 97) for n in range(1, 50)]
    buckets = list(bucketed([(length, "stale" if length > 80 else "") for length in lengths]))
    assert sum(bucket.slots for bucket in buckets) == len(lengths)
    assert [sum(bucket.dropped.values()) for bucket in buckets] == [0, 0, 0, sum(length > 80 for length in lengths)]


def test_long_drops_show_where_a_total_would_hide_them() -> None:
    fates = [Fate(10.0 * n, float(n)) for n in range(1, 98)]
    fates += [Fate(1000.0, 99.0, "stale"), Fate(990.0, 98.0, "stale"), Fate(None, None, "stale"), Fate(None, None)]
    drops = by_length(fates)
    assert drops.tokens[-1] == Bucket(up_to=1000.0, slots=24, dropped={"stale": 2})
    assert [bucket.dropped for bucket in drops.wall_s] == [{}, {}, {}, {"stale": 2}]
    assert drops.unknown == {"stale": 1}, "one that still runs is not a drop"
    assert by_length([]) == DropsByLength()
