"""The exponent-context code: exact, smaller where small weights change more, and no crash on damaged streams."""

import itertools

import msgspec
import numpy as np
import pytest

from headrace.weights.codecs import context_delta, loops, ulp_delta
from headrace.weights.codecs.streams import Stream, pack
from headrace.weights.state import Bits, WeightError
from tests.support.weights import weights


def adam(rng: np.random.Generator, base: Bits, rate: float) -> Bits:
    """A step of one size everywhere, as Adam takes it, on master weights that round to `base` in bf16."""
    values = (base.astype(np.uint32) << 16).view(np.float32)
    ulp = np.abs(values) * 2.0**-8
    master = values + (rng.random(base.size) - 0.5) * ulp
    moved = (master + rate * rng.choice([-1, 1], base.size)).astype(np.float32)
    bits = moved.view(np.uint32)
    rounded: Bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def coded(base: Bits, target: Bits, dtype: str = "BF16") -> tuple[tuple[Stream, ...], int]:
    at, old, new = ulp_delta.changes([base], [target])
    return context_delta.encode(base, dtype, at, ulp_delta.zigzag_difference(old, new)), at.size


@pytest.mark.parametrize("dtype", list(context_delta.EXPONENTS))
def test_ranks_are_counted_within_classes_and_find_their_members_again(dtype: str) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 63, 64, 65, 10_000):
        bits = weights(rng, count, dtype)
        fields = context_delta.exponents(bits, dtype)
        bounds = [(int(fields.min()), int(fields.min())), (int(fields.max()), int(fields.max()))]
        shift, table = (
            context_delta.EXPONENTS[dtype][0],
            context_delta._table(bounds[: 1 + (bounds[0] < bounds[1])], dtype),
        )
        classes = [np.flatnonzero(fields == low) for low, _ in bounds[: 1 + (bounds[0] < bounds[1])]]
        at = np.sort(np.concatenate(classes))
        ranks = np.empty(at.size, np.int64)
        loops.ranks(bits, shift, table, at, ranks)
        for members in classes:
            assert np.array_equal(ranks[np.isin(at, members)], np.arange(members.size))
        wanted, ends = (
            np.concatenate([np.arange(members.size) for members in classes]),
            np.cumsum([c.size for c in classes]),
        )
        found = np.empty(wanted.size, np.int64)
        assert loops.members(bits, shift, table, ends, wanted, found) == wanted.size
        assert np.array_equal(found, np.concatenate(classes))
        wanted[-1] += 1
        assert loops.members(bits, shift, table, ends, wanted, found) == wanted.size - 1, "behind the last member"


@pytest.mark.parametrize("rate", [1e-7, 1e-6, 1e-5, 1e-3])
def test_it_is_exact_and_smaller_than_the_plain_code(rate: float) -> None:
    rng = np.random.default_rng(2)
    base = weights(rng, 600_000)
    target = adam(rng, base, rate)
    streams, items = coded(base, target)
    at, zigzagged = context_delta.decode(base, "BF16", streams, items)
    out = base.copy()
    out[at] += ulp_delta.unzigzag(zigzagged)
    assert np.array_equal(out, target)
    changed, old, new = ulp_delta.changes([base], [target])
    plain = (
        pack(ulp_delta.gaps_of(changed)),
        *ulp_delta.pack_values(ulp_delta.zigzag_difference(old, new)),
    )
    assert sum(len(s.data) for s in streams) < 0.8 * sum(len(s.data) for s in plain)


def test_classes_cover_every_change_and_are_not_too_many() -> None:
    rng = np.random.default_rng(3)
    for changed in (np.array([7], np.uint8), rng.integers(0, 256, 5000, dtype=np.uint8), np.full(900, 3, np.uint8)):
        bounds = context_delta.classes(changed)
        assert len(bounds) <= context_delta.MOST_CLASSES
        assert all(low <= high for low, high in bounds)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(bounds))
        assert all(any(low <= value <= high for low, high in bounds) for value in set(changed.tolist()))


def test_damaged_streams_are_refused() -> None:
    rng = np.random.default_rng(4)
    base = weights(rng, 100_000)
    streams, items = coded(base, adam(rng, base, 3e-6))
    for broken in (
        streams[:-1],
        streams[1:],
        (streams[0], streams[2], streams[1], *streams[3:]),
        (Stream(0, 3, b"abc"), *streams[1:]),
        (*streams[:-1], pack(np.zeros(1, np.uint8))),
        (msgspec.structs.replace(streams[0], data=streams[0].data[::-1]), *streams[1:]),
    ):
        with pytest.raises(WeightError):
            context_delta.decode(base, "BF16", broken, items)
    with pytest.raises(WeightError, match="for"):
        context_delta.decode(base, "BF16", streams, items + 1)
