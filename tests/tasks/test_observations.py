"""The host's bounded parser reads what the guest's half writes and answers everything else with ValueError."""

import json
import random
from typing import Any

import pytest

from headrace.tasks.observations import HASHED, decode
from headrace.tasks.sealing import equal
from headrace.vmhost.guest.testing.observing import encode

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -3,
    1 << 200,
    1.5,
    float("inf"),
    "",
    "text \ud800 \x00",
    b"\x00\xff",
    [],
    [1, [2, (3,)]],
    (),
    {1, 2},
    frozenset("ab"),
    {"a": [1], (1, 2): None},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_what_the_guest_writes_is_read_back(value: Any) -> None:
    assert decode(encode(7, (value,))) == (7, (value,))


def deep(levels: int) -> str:
    return '[0,["t",[' + '["l",[' * levels + '["n"]' + "]]" * levels + "]]]"


@pytest.mark.parametrize(
    "text",
    [
        "[0,[" + '"t",[["f",1' + "0" * 400 + "]]]]",  # float(int) overflows: the judge gave no verdict at all
        '[0,["t",[["f",' + "9" * 5000 + "]]]]",  # more digits than Python converts
        '[0,["t",[["i","0x' + "f" * 20_000 + '"]]]]',
        '[0,["t",[["i","1e9"]]]]',
        '[0,["t",[["i",6]]]]',
        '[0,["t",[["b",1]]]]',
        '[0,["t",[["f",true]]]]',
        '[0,["t",[["y","0"]]]]',
        '[0,["t",[["s",["n"]]]]]',
        '[0,["t",[["e",[["l",[]]]]]]]',
        '[0,["t",[["d",[[["d",[]],["n"]]]]]]]',
        '[0,["t",[["d",[["n"]]]]]]',
        '[0,["t",[["?","object"]]]]',
        '[0,["t",[["n",1]]]]',
        '[0,"n"]',
        "[0]",
        "[true,[]]",
        "[0.0,[]]",
        "{}",
        "",
        "\ud800",
        "[" * 100_000,
        deep(60),
        deep(100_000),
    ],
    ids=lambda text: text[:30],
)
def test_a_forged_observation_equals_nothing_and_raises_nothing_else(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)
    assert equal(text, (0, "6")) is False
    assert equal(text, (0, "")) is False


def test_a_set_whose_items_collide_is_refused_before_it_is_hashed() -> None:
    modulus = (1 << 61) - 1  # integers that differ by multiples of it have one hash
    forged = encode(0, (set(),)).replace("[]", json.dumps([["i", hex(n * modulus)] for n in range(30_000)]))
    with pytest.raises(ValueError, match=f"at most {HASHED} are compared"):
        decode(forged)
    assert equal(forged, (0, "set()")) is False


def forged(random_: random.Random) -> str:
    """An observation that somebody made up: structure, mutated text or noise, never with the answer in it."""

    def value(depth: int) -> Any:
        kind = random_.choice("nbifsyltedx?[]0")
        bodies: list[Any] = [
            random_.choice([None, True, 0, -1, 1.5, 10**300, "", "0x1", "zz", "nan", "\ud800", "00", {}, []]),
            [value(depth + 1) for _ in range(random_.randrange(3))] if depth < 3 else [],
            [[value(depth + 1), value(depth + 1)] for _ in range(random_.randrange(3))] if depth < 3 else [],
        ]
        return random_.choice([[kind, random_.choice(bodies)], [kind], [kind, *bodies], kind, random_.choice(bodies)])

    text = json.dumps([random_.choice([0, 0, 0, -1, 1.0, True, None, "0", 10**30]), value(0)])
    for _ in range(random_.choice([0, 0, 1, 3])):
        at = random_.randrange(len(text) + 1)
        text = text[:at] + random_.choice(['"', "[", "]", "9" * 400, "\x00", "é", "", "1e999", "NaN"]) + text[at + 1 :]
    return text


@pytest.mark.parametrize("count", [4_000, pytest.param(200_000, marks=pytest.mark.slow)], ids=["some", "many"])
def test_no_forged_observation_raises_or_equals_a_secret(count: int) -> None:
    random_ = random.Random(2026)
    for _ in range(count):
        assert equal(forged(random_), (0, "0x5eed5eed5eed5eed")) is False
