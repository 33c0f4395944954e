"""The parts that are taken out of hidden tests, and how the judge compares what they saw."""

import ast
import builtins
from collections.abc import Callable

import pytest

from headrace.messages import sandbox
from headrace.tasks.observations import decode
from headrace.tasks.sealing import ALLOWANCE, compare_answers, equal, known, pairs, recorded, seal, too_much, unequal
from headrace.vmhost.guest.testing.observing import LIMIT, Observations, encode

SOURCE = """from x import f


def test_one():
    assert f(1) == 5
    assert [1, (2, "ü")] == f(
        # äöü
        2,
    ), "message"
    assert f(3) == f(4)


class TestTwo(TestCase):
    def test_two(self):
        for n in (1, 2):
            self.assertEqual(f(n), {"a": None}); self.assertEqual(7, f(n), "why")
        with raises(ValueError):
            assert f(9)
""".encode()
FILES = {
    "test_x.py": SOURCE,
    "data.txt": b"assert f(1) == 5",
    "broken_test.py": b"def",
    "test_y.py": b"assert f() == 1",
}


def test_literals_are_taken_out_and_lines_stay_where_they_were() -> None:
    sealed = seal(FILES)
    assert sealed.literals == {0: "5", 1: "[1, (2, 'ü')]", 2: "", 3: "{'a': None}", 4: "7", 5: "1"}
    assert sealed.comparisons == 7 and set(sealed.files) == {"test_x.py", "test_y.py"}
    text = sealed.files["test_x.py"].decode()
    tree = ast.parse(text)
    literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not literals & {"ü", "a"} and "5" not in text.partition("class")[0].replace("__observe__(5", "")
    assert text.count("\n") == SOURCE.count(b"\n")
    assert [line for line in text.splitlines() if "raises" in line] == [
        line for line in SOURCE.decode().splitlines() if "raises" in line
    ]
    assert known(sealed) == {"test_x.py::test_one": ((0, "5"), (1, "[1, (2, 'ü')]"), (2, ""))}


def test_a_comparison_can_be_left_as_it_is() -> None:
    sealed = seal(FILES, {0, 4})
    assert set(sealed.literals) == {1, 2, 3, 5}
    assert (
        b"assert f(1) == 5" in sealed.files["test_x.py"] and b'assertEqual(7, f(n), "why")' in sealed.files["test_x.py"]
    )


@pytest.mark.parametrize(
    "source",
    [
        b"assert 1 == 1",
        b"assert f() != 1",
        b"assert 1 == f() == 1",
        b"assert f() is None",
        b"async def test_a():\n    assert (await f()) == 1",
        b"assert f()",
        b"self.assertEqual(*pair)",
    ],
)
def test_what_is_not_a_value_against_a_literal_stays(source: bytes) -> None:
    assert not seal({"t.py": source}).files


def ran(files: dict[str, bytes], name: str, **names: object) -> list[str]:
    """The observations of a sealed plain function of test_x.py."""
    seen = Observations()
    space: dict[str, object] = {"__builtins__": builtins, "__observe__": seen.observe, **names}
    source = files["test_x.py"].replace(b"from x import f", b"").partition(b"class")[0]
    exec(source, space)
    function = space[name]
    assert isinstance(function, Callable)  # type: ignore[arg-type]
    function()  # type: ignore[operator]
    return seen.take()


def outcome(seen: list[str]) -> sandbox.TestOutcome:
    return sandbox.TestOutcome("test_x.py::test_one", "passed", "", tuple(seen))


def right(n: int) -> object:
    return {1: 5.0, 2: [1, (2, "ü")]}.get(n, 0)


def test_only_who_knows_the_values_passes() -> None:
    sealed = seal(FILES)
    answers = known(sealed)
    good = outcome(ran(sealed.files, "test_one", f=right))
    assert compare_answers([good], answers) == (good,)  # 5.0 == 5 here as there
    assert recorded(sealed, [good]) == answers and unequal(sealed, [good]) == frozenset()
    for seen in (
        ran(sealed.files, "test_one", f=lambda n: 5),
        [],  # a report without observations
        list(good.observed[:1]),
        list(good.observed[::-1]),
        [*good.observed, good.observed[0]],
        ["forged", good.observed[1]],
    ):
        (settled,) = compare_answers([outcome(seen)], answers)
        assert settled.outcome == "failed" and settled.message.startswith("comparison ")
        assert compare_answers([settled], answers) == (settled,)
    failed = sandbox.TestOutcome("test_x.py::test_one", "error", "in set-up")
    assert compare_answers([failed], answers) == (failed,)


def test_an_object_that_equals_everything_equals_nothing_here() -> None:
    class Any:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Five(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    sealed = seal(FILES)
    assert not equal(encode(0, (Any(),)), (0, "5"))
    assert not equal(encode(0, (Five(4),)), (0, "5")) and equal(encode(0, (Five(5),)), (0, "5"))
    assert not equal(encode(2, (Any(), Any())), (2, "")) and not equal(encode(2, (1,)), (2, ""))
    assert equal(encode(2, (1, 1.0)), (2, "")) and not equal(encode(2, (1, 2)), (2, ""))
    assert unequal(sealed, [outcome([encode(0, (Any(),)), encode(1, ([1, (2, "ü")],))])]) == {0}


def test_two_computed_values_get_those_of_the_right_code() -> None:
    sealed = seal(FILES)
    first = outcome(ran(sealed.files, "test_one", f=right))
    told = recorded(sealed, [first], [first], [first])
    assert told["test_x.py::test_one"] == ((0, "5"), (1, "[1, (2, 'ü')]"), (2, "0"))
    assert (pairs(sealed, told), pairs(sealed, known(sealed))) == ((1, 1), (0, 1))
    assert compare_answers([first], told) == (first,)
    forged = outcome([*first.observed[:2], encode(2, (1, 1))])
    assert compare_answers([forged], known(sealed)) == (forged,)
    for values in ((1, 1), (0, 1), (1, 0), (), (None,)):
        (settled,) = compare_answers([outcome([*first.observed[:2], encode(2, values)])], told)
        assert settled.outcome == "failed" and settled.message.startswith("comparison 3 of 3")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([(7, 7.0)], "7"),
        ([(7.0, 7), (7, 7)], "7"),
        ([], ""),
        ([(7, 7), (8, 8)], ""),
        ([(7, 8)], ""),
        ([None], ""),
        ([()], ""),
    ],
)
def test_a_value_is_recorded_only_if_every_run_saw_it(others: list[tuple[object, ...] | None], text: str) -> None:
    sealed = seal({"t.py": b"def test_a():\n    assert f() == g()\n"})

    def run(values: tuple[object, ...] | None) -> list[sandbox.TestOutcome]:
        return [sandbox.TestOutcome("t.py::test_a", "passed", "", () if values is None else (encode(0, values),))]

    assert recorded(sealed, run((7, 7)), *map(run, others)) == {"t.py::test_a": ((0, text),)}


def test_the_largest_comparisons_make_room_for_all_others() -> None:
    def run(*sizes: int) -> list[sandbox.TestOutcome]:
        seen = (encode(number, ("x" * size,)) for number, size in enumerate(sizes))
        return [sandbox.TestOutcome("t", "passed", "", tuple(seen))]

    assert too_much(run(ALLOWANCE - 200, 5, 5)) == frozenset()
    assert too_much(run(5, ALLOWANCE, 5)) == {1}
    assert too_much(run(ALLOWANCE // 2, ALLOWANCE // 3, ALLOWANCE // 4, 9)) == {0}
    assert too_much([*run(5, ALLOWANCE // 2), *run(7, ALLOWANCE // 2)]) == {1}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x" * (1 << 16), [float("inf")], {1: {2: float("nan")}}])
def test_what_no_literal_can_say_is_not_recorded(value: object) -> None:
    sealed = seal({"t.py": b"def test_a():\n    assert f() == g()\n"})
    run = [sandbox.TestOutcome("t.py::test_a", "passed", "", (encode(0, (value, value)),))]
    assert recorded(sealed, run, run) == {"t.py::test_a": ((0, ""),)}


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 1 << 5000, 0.1, float("inf"), "ä\ud800\n", b"\x00\xff", [1, [2]], (), {"a": {1: (2,)}}, {1, 2}],
)
def test_values_survive_the_way_out(value: object) -> None:
    number, values = decode(encode(3, (value,)))
    assert isinstance(values, tuple)
    assert (number, values, type(values[0])) == (3, (value,), type(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1]",
        '["x", ["n"]]',
        '[1, ["?", "object"]]',
        '[1, ["i", 5]]',
        '[1, ["d", [[1]]]]',
        '[1, ["e", [["l", []]]]]',
        "[" * 100_000,
        "[1, " + '["l", [' * 60 + "]" * 121,
        '[1, ["s", 4]]',
        '[true, ["n"]]',
        '[1, ["i", "zz"]]',
    ],
)
def test_what_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_deep_values_and_floods_are_bounded() -> None:
    deep: list[object] = []
    deep.append(deep)
    with pytest.raises(ValueError, match="deep"):
        decode(encode(0, (deep,)))
    seen = Observations()
    for _ in range(100):
        seen.observe(0, "x" * 50_000)
    assert sum(map(len, seen.take())) <= LIMIT
