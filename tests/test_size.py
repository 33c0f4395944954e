"""`make size` counts lines of code, and every place of a concern exists; `make size-path` counts files of a path."""

from pathlib import Path

from tests.support.paths import ROOT
from tests.test_docs import script

size, size_path = script("size"), script("size_path")


def test_a_line_of_code_is_no_comment_and_no_docstring(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    lines = ['"""Idea.', "", 'More."""', "", "X = 1  # why", '"""What X is."""', "# a comment", "", "def f():"]
    file.write_text("\n".join([*lines, '    """Does."""', "    return (", "        X", "    )", ""]))
    assert size.code_lines(file) == 1 + 1 + 1 + 3
    assert size.size((str(tmp_path), str(file)), ROOT) == 6, "a file counts once"


def test_every_place_of_a_concern_exists() -> None:
    assert [place for places in size.CONCERNS.values() for place in places if not (ROOT / place).exists()] == []


def test_a_path_has_the_files_that_ran_between_an_episode_and_a_step() -> None:
    begin, end = size_path.BOUNDS
    rows = [
        size_path.Ran("rollout", 1, "engines/early.py"),
        size_path.Ran("rollout", 2, begin),
        size_path.Ran("rollout", 3, "weights/loaded.py"),
        size_path.Ran("rollout", 3, "messages/rollout.py"),
        size_path.Ran("curriculum,evaluator", 3, "ledger/training.py"),
        size_path.Ran("weight_sender", 3, "weights/encoded.py"),
        size_path.Ran("dead_letter", 3, "actors/dead_letter.py"),
        size_path.Ran("trainer", 4, end),
        size_path.Ran("trainer", 5, "training/late.py"),
    ]
    step, version = size_path.paths(rows).values()
    assert step == {begin, "weights/loaded.py", "ledger/training.py", end}
    assert version == {"weights/loaded.py", "weights/encoded.py"}


def test_every_file_that_bounds_a_path_exists() -> None:
    assert [file for file in size_path.BOUNDS if not (ROOT / "headrace" / file).exists()] == []
