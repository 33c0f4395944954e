"""The exponent-context code: exact, smaller where small weights change more, and no crash on damaged streams."""

import itertools

import msgspec
import numpy as np
import pytest

from headrace.weights.codecs import context_delta, ulp_delta
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
    at, old, new = ulp_delta.changes(base, target)
    return context_delta.encode(
        context_delta.exponents(base, dtype), at, ulp_delta.zigzag_difference(old, new)
    ), at.size


def test_ranks_and_selection_are_each_others_inverse() -> None:
    rng = np.random.default_rng(1)
    for count in (1, 63, 64, 65, 10_000):
        fields = rng.integers(100, 110, count, dtype=np.uint8)
        for low, high in ((100, 109), (104, 104), (107, 255), (0, 3)):
            members = context_delta._Members(fields, low, high)
            inside = np.flatnonzero((fields >= low) & (fields <= high))
            assert np.array_equal(members.rank(inside), np.arange(inside.size))
            assert np.array_equal(members.select(np.arange(inside.size)), inside)
            with pytest.raises(WeightError, match="behind the last member"):
                members.select(np.array([inside.size]))


@pytest.mark.parametrize("rate", [1e-7, 1e-6, 1e-5, 1e-3])
def test_it_is_exact_and_smaller_than_the_plain_code(rate: float) -> None:
    rng = np.random.default_rng(2)
    base = weights(rng, 600_000)
    target = adam(rng, base, rate)
    streams, items = coded(base, target)
    at, zigzagged = context_delta.decode(context_delta.exponents(base, "BF16"), streams, items, base.dtype)
    out = base.copy()
    out[at] += ulp_delta.unzigzag(zigzagged)
    assert np.array_equal(out, target)
    changed, old, new = ulp_delta.changes(base, target)
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
    fields = context_delta.exponents(base, "BF16")
    for broken in (
        streams[:-1],
        streams[1:],
        (streams[0], streams[2], streams[1], *streams[3:]),
        (Stream(0, 3, b"abc"), *streams[1:]),
        (*streams[:-1], pack(np.zeros(1, np.uint8))),
        (msgspec.structs.replace(streams[0], data=streams[0].data[::-1]), *streams[1:]),
    ):
        with pytest.raises(WeightError):
            context_delta.decode(fields, broken, items, base.dtype)
    with pytest.raises(WeightError, match="for"):
        context_delta.decode(fields, streams, items + 1, base.dtype)
