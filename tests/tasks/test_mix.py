"""A mix of suites: shares hold at every place, every task of the longest suite comes, names lead back."""

from pathlib import Path

import pytest

from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.mix import _Ids


def test_shares_hold_at_every_place() -> None:
    ids = _Ids([[f"a{n}" for n in range(7)], [f"b{n}" for n in range(3)]], [3, 1])
    assert len(ids) == 12 and len(set(ids)) == 10
    for end in range(1, len(ids) + 1):
        first = sum(id.startswith("0~") for id in ids[:end])
        assert abs(first - 0.75 * end) <= 1.0, end
    assert {id for id in ids} == {f"0~a{n}" for n in range(7)} | {f"1~b{n}" for n in range(3)}
    assert ids[-1] == ids[len(ids) - 1]
    with pytest.raises(IndexError):
        ids[len(ids)]


def test_a_mix_of_generated_suites_is_a_suite() -> None:
    mix = open_suite("mix/generated/train*3+generated/heldout")
    counts = [id.partition("~")[0] for id in mix.ids()[:8]]
    assert counts.count("0") == 6 and counts.count("1") == 2
    id = mix.ids()[0]
    task, oracle = mix.task(id), mix.oracle(id)
    assert (
        (task.ref.suite, task.ref.task)
        == ("mix/generated/train*3+generated/heldout", id)
        == tuple((oracle.ref.suite, oracle.ref.task))
    )
    inner = open_suite("generated/train").task(id.partition("~")[2])
    assert task.files == inner.files


@pytest.mark.parametrize("name", ["mix/", "mix/nowhere*2", "mix/generated/train*0", "mix/generated/train+"])
def test_what_is_no_mix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownSuite):
        open_suite(name, tmp_path)


def test_an_id_of_no_part_is_refused() -> None:
    with pytest.raises(UnknownSuite, match="has no task '7~1'"):
        open_suite("mix/generated/train").task("7~1")


@pytest.mark.parametrize("id", ["²~1", "٠~1", "-1~1", f"{'9' * 5000}~1", "00000000000~1", "~1", ""])
def test_an_id_is_a_number_of_ascii_digits(id: str) -> None:
    """Ids come from clients: any other digit was an error inside `int`, or a second name of a task."""
    with pytest.raises(UnknownSuite, match="has no task"):
        open_suite("mix/generated/train").task(id)
