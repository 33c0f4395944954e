"""The sparse code: changes, gaps and differences, each exact for every bit pattern."""

import numpy as np
import pytest

from headrace.weights.codecs import loops, streams, ulp_delta
from headrace.weights.state import WeightError
from tests.support.weights import DENSITIES, stepped, weights

KINDS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"))


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("density", DENSITIES)
def test_changes_are_those_that_a_plain_comparison_finds(dtype: str, density: float) -> None:
    rng = np.random.default_rng(1)
    for count in (0, 1, 7, 20_001):
        base = weights(rng, count, dtype)
        target = stepped(rng, base, density)
        at, old, new = ulp_delta.changes([base], [target])
        assert np.array_equal(at, np.flatnonzero(base != target))
        assert np.array_equal(old, base[at])
        assert np.array_equal(new, target[at])


def test_changes_of_an_unaligned_slice() -> None:
    rng = np.random.default_rng(2)
    base = weights(rng, 5000)
    target = stepped(rng, base, 0.01)
    at, _, _ = ulp_delta.changes([base[3:]], [target[3:]])
    assert np.array_equal(at, np.flatnonzero(base[3:] != target[3:]))


@pytest.mark.parametrize(
    "positions",
    [
        [],
        [0],
        [254],
        [255],
        [256],
        [509],
        [510],
        [0, 1, 2],
        [0, 256, 511, 512],
        [3, 100_000, 100_001],
        list(range(600)),
    ],
)
def test_positions_survive_their_gaps(positions: list[int]) -> None:
    at = np.array(positions, np.int64)
    assert ulp_delta.positions_of(ulp_delta.gaps_of(at)).tolist() == positions


@pytest.mark.parametrize("density", [0.0001, 0.004, 0.02, 0.5])
def test_random_positions_survive_their_gaps(density: float) -> None:
    at = np.flatnonzero(np.random.default_rng(3).random(200_000) < density)
    gaps = ulp_delta.gaps_of(at)
    assert gaps.size <= at.size + 200_000 // loops.ESCAPE + 1
    assert np.array_equal(ulp_delta.positions_of(gaps), at)


@pytest.mark.parametrize("kind", KINDS)
def test_differences_are_exact_for_any_two_patterns(kind: np.dtype[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(4)
    old = rng.integers(0, 1 << (8 * kind.itemsize), 70_000, dtype=kind)
    new = rng.integers(0, 1 << (8 * kind.itemsize), 70_000, dtype=kind)
    assert np.array_equal(old + ulp_delta.unzigzag(ulp_delta.zigzag_difference(old, new)), new)
    values, exceptions = ulp_delta.pack_values(ulp_delta.zigzag_difference(old, new))
    back = ulp_delta.unpack_values(values, exceptions, old.size, kind)
    assert np.array_equal(old + ulp_delta.unzigzag(back), new)


def test_one_unit_in_the_last_place_is_the_smallest_symbol() -> None:
    old = np.array([0x3F80, 0x3F80, 0xBF80, 0x0000, 0x8000], np.uint16)
    new = np.array([0x3F81, 0x3F7F, 0xBF81, 0x8000, 0x0000], np.uint16)
    # The two zeros differ in the sign alone: half the ring, which is its own opposite.
    assert ulp_delta.zigzag_difference(old, new).tolist() == [2, 1, 2, 0xFFFF, 0xFFFF]


@pytest.mark.parametrize("kind", KINDS)
def test_planes_are_taken_apart_and_put_together(kind: np.dtype[np.unsignedinteger]) -> None:
    array = np.arange(1000, dtype=np.uint32).astype(kind)
    laid = ulp_delta.planes(array)
    assert laid[:1000].tolist() == [number & 255 for number in range(1000)]
    assert np.array_equal(ulp_delta.unplanes(laid, kind), array)


def test_streams_refuse_what_they_do_not_promise() -> None:
    data = np.zeros(1000, np.uint8)
    packed = streams.pack(data)
    assert len(packed.data) < 100
    assert np.array_equal(streams.unpack(packed, 1000), data)
    with pytest.raises(WeightError, match="at most 999"):
        streams.unpack(packed, 999)
    for wrong in (
        streams.Stream(packed.kind, 500, packed.data),
        streams.Stream(packed.kind, 1000, packed.data[:-1]),
        streams.Stream(packed.kind, 1000, b""),
        streams.Stream(7, 1000, packed.data),
    ):
        with pytest.raises(WeightError):
            streams.unpack(wrong, 1000)
    noise = np.random.default_rng(5).integers(0, 256, 500, dtype=np.uint8)
    assert streams.pack(noise).kind == streams.RAW
