"""`make size` counts lines of code, and every place of a concern exists."""

from pathlib import Path

from tests.support.paths import ROOT
from tests.test_docs import script

size = script("size")


def test_a_line_of_code_is_no_comment_and_no_docstring(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    lines = ['"""Idea.', "", 'More."""', "", "X = 1  # why", '"""What X is."""', "# a comment", "", "def f():"]
    file.write_text("\n".join([*lines, '    """Does."""', "    return (", "        X", "    )", ""]))
    assert size.code_lines(file) == 1 + 1 + 1 + 3
    assert size.size((str(tmp_path), str(file)), ROOT) == 6, "a file counts once"


def test_every_place_of_a_concern_exists() -> None:
    assert [place for places in size.CONCERNS.values() for place in places if not (ROOT / place).exists()] == []
