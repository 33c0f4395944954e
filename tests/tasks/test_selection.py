"""A selection of another suite's tasks: a suite with their certificates, and an overlap with their names."""

from pathlib import Path

import pytest

from headrace.tasks import UnknownSuite, certificates, open_suite
from headrace.tasks.overlap import overlap
from headrace.tasks.suites import write_index
from tests.tasks.test_overlap import made


def select(root: Path, name: str, of: str, *ids: str) -> str:
    (root / name).mkdir()
    write_index(name, root / name, ids, "", "report", of=of)
    return name


def test_a_selection_holds_the_chosen_tasks_with_their_certificates(tmp_path: Path) -> None:
    train = open_suite("generated/train")
    first, second = train.ids()[5], train.ids()[900]
    suite = open_suite(select(tmp_path, "band", "generated/train", first, second), tmp_path)
    assert list(suite.ids()) == [first, second]
    assert (suite.task(first).files, suite.task(first).ref.suite) == (train.task(first).files, "band")
    assert suite.oracle(second).hidden == train.oracle(second).hidden
    assert certificates.refusal(suite, tmp_path, uncertified=False) == ""
    assert certificates.AtIssue(suite, tmp_path).refusal(second) == ""
    with pytest.raises(UnknownSuite, match="has no task"):
        suite.task(train.ids()[6])


def test_certificates_are_asked_of_the_chosen_tasks_alone(tmp_path: Path) -> None:
    made(tmp_path, "mine", [("a", 1), ("b", 2)])
    suite = open_suite(select(tmp_path, "band", "mix/generated/train+mine", "1~b"), tmp_path)
    assert "suite mine has no certificates" in certificates.refusal(suite, tmp_path, uncertified=False)
    assert [(part.name, id) for part, id in certificates.wanting(suite, tmp_path).values()] == [("mine", "b")]


def test_a_selection_shares_the_tasks_of_its_suite(tmp_path: Path) -> None:
    made(tmp_path, "mine", [(f"a{n}", n) for n in range(150)])
    made(tmp_path, "other", [("b0", 0)])
    band = select(tmp_path, "band", "mix/generated/train+mine", *(f"1~a{n}" for n in range(1, 120)))
    assert "118 more" in overlap(open_suite(band, tmp_path), ["mine"], tmp_path).refused
    assert overlap(open_suite(band, tmp_path), ["other"], tmp_path) == ("", frozenset())
    more = select(tmp_path, "more", "mix/generated/train+mine", *(f"1~a{n}" for n in range(120)))
    assert overlap(open_suite(more, tmp_path), ["other"], tmp_path) == ("", frozenset({"1~a0"}))
    assert "118 more" in overlap(open_suite("mix/generated/train+band", tmp_path), ["mine"], tmp_path).refused


def test_a_selection_of_itself_is_refused(tmp_path: Path) -> None:
    select(tmp_path, "one", "two", "a")
    select(tmp_path, "two", "one", "a")
    with pytest.raises(UnknownSuite, match="too many suites"):
        open_suite("one", tmp_path)
