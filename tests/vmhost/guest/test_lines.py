"""One definition of a line, and of a path in one line: every byte of a file and every name comes back."""

import os
import re
import sys

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.vmhost.guest import lines, names

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=5_000)
SEPARATORS = ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0"]
TEXTS = st.lists(st.sampled_from([*SEPARATORS, "a", "é", " ", "\\r", "\\xff", "\ufeff", "\U0001f600"]), max_size=12)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "latin-1", "shift_jis", "utf-32"]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of any encoding, with every separator, and sometimes with bytes that are no text."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=20))
    data = "".join(draw(TEXTS)).encode(draw(st.sampled_from(ENCODINGS)), "replace")
    return data + draw(st.sampled_from([b"", b"", b"\xff", b"\xed\xa0\x80\n", b"\n"]))


NEW = st.lists(st.text(st.sampled_from(["x", " ", "\r", "\x0c", "\u2028", "é", "\t"]), max_size=4), max_size=3)


def check_replaced(data: bytes, new: list[str], draw: st.DataObject) -> None:
    """Exactly the asked lines change; all other bytes are equal."""
    text = lines.parse(data)
    assert text.data == data
    count = len(text.lines)
    first = draw.draw(st.integers(1, count + 1))
    last = draw.draw(st.integers(first - 1, count))
    new = [line.rstrip("\r") for line in new]
    after = lines.parse(lines.replaced(data, first, last, lines.joined(new)))
    assume(text.mark or not after.mark)  # a later line that begins with a mark became the first one
    assert after.mark == text.mark
    assert [lines.body(line) for line in after.lines] == [
        *(lines.body(line) for line in text.lines[: first - 1]),
        *new,
        *(lines.body(line) for line in text.lines[last:]),
    ]
    behind = "".join(text.lines[last:])
    assert "".join(after.lines).endswith(behind)
    kept = "".join(text.lines[: first - 1])
    assert "".join(after.lines).startswith(kept), "an end may only be added behind the file's last line"
    ends = {line[len(lines.body(line)) :] for line in after.lines[first - 1 : first - 1 + len(new)]}
    known = {line[len(lines.body(line)) :] for line in text.lines}
    assert ends <= known | {"\n" if known <= {""} else "", "\r\n" if any("\r" in line for line in text.lines) else ""}
    if count and last < count and first <= count:
        assert after.lines[-1] == text.lines[-1], "the final line end, or its absence, stays"


@FEW
@given(files(), NEW, st.data())
def test_only_the_asked_lines_change(data: bytes, new: list[str], draw: st.DataObject) -> None:
    check_replaced(data, new, draw)


@pytest.mark.slow
@MANY
@given(files(), NEW, st.data())
def test_only_the_asked_lines_of_many_files_change(data: bytes, new: list[str], draw: st.DataObject) -> None:
    check_replaced(data, new, draw)


@pytest.mark.parametrize(
    ("data", "first", "last", "text", "after"),
    [
        (b"a\x0cb\nc\nd\n", 2, 2, "X", b"a\x0cb\nX\nd\n"),
        (b"a\r\nb\r\n", 2, 2, "X\nY", b"a\r\nX\r\nY\r\n"),
        (b"a\r\nb\nc", 1, 3, "X\nY\nZ", b"X\r\nY\nZ"),
        (b"\xef\xbb\xbfa\nb\n", 1, 1, "X", b"\xef\xbb\xbfX\nb\n"),
        (b"a\nb", 2, 2, "X\n", b"a\nX"),
        (b"a\r\nb", 3, 2, "X", b"a\r\nb\r\nX"),
        (b"a\r", 2, 1, "X", b"a\r\r\nX"),
        ("a\nb\n".encode("utf-16"), 2, 2, "é", "a\né\n".encode("utf-16")),
        (b"\xe9\n\xe8\n", 2, 2, "X", b"\xe9\nX\n"),
        (b"", 1, 0, "X", b"X\n"),
        (b"a\nb\nc\n", 2, 2, "", b"a\nc\n"),
        (b"a\nc\n", 2, 1, "\n", b"a\n\nc\n"),
    ],
)
def test_new_lines_take_the_ends_of_the_file(data: bytes, first: int, last: int, text: str, after: bytes) -> None:
    assert lines.replaced(data, first, last, text) == after


def test_a_line_is_shown_without_what_reads_like_another_line() -> None:
    data = b"\xef\xbb\xbfa\rb\r\nc\x0cd\xff\0\xe2\x80\xa8e\r"
    assert lines.shown_lines(data) == ["a\\rb", "c\x0cd\\xff\\x00\u2028e\\r"]


PATHS = st.binary(min_size=1, max_size=12).map(lambda data: os.fsdecode(data.replace(b"\0", b"\n"))) | st.text(
    st.sampled_from([" ", "a", "/", "\\", "n", "x", "4", "\n", "\u202e", "\xa0", "é", "\udcff", "\U000e0001", '"']),
    min_size=1,
    max_size=10,
)


def check_path(path: str) -> None:
    """One printable line that keeps its ends when it is stripped, and leads back."""
    shown = names.shown(path)
    assert names.raw(shown) == path
    assert shown.isprintable() and shown == shown.strip()
    shown.encode()
    if not re.search(r"\\x[89a-f]|\\ud", path):  # else it spells the escape of a byte
        assert names.raw(names.of_key(names.key(shown))) == path


@FEW
@given(PATHS)
def test_a_path_is_one_line_that_leads_back(path: str) -> None:
    check_path(path)


@pytest.mark.slow
@MANY
@given(PATHS)
def test_many_paths_are_one_line_that_leads_back(path: str) -> None:
    check_path(path)


def test_common_names_stay_as_they_are() -> None:
    for path in ("src/a b.py", "ünïcode/日本.txt", "back\\slash", "C:\\dir", "-rf", "'\"*?"):
        assert names.shown(path) == path
    assert names.shown("a\nb ") == "a\\nb\\x20"
    assert names.shown("unit-by\\x2dlabel") == "unit-by\\\\x2dlabel"
    assert sys.getfilesystemencodeerrors() == "surrogateescape"


def test_every_path_of_an_operation_is_taken_back() -> None:
    header = {
        "op": "write_files",
        "path": "a\\nb",
        "paths": ["\\xff"],
        "delete": ("c\\x20",),
        "entries": [["d\\t", "gone"]],
    }
    read = names.received(header)
    assert read == {
        "op": "write_files",
        "path": "a\nb",
        "paths": ["\udcff"],
        "delete": ["c "],
        "entries": [["d\t", "gone"]],
    }
    test = names.received({"op": "run_tests", "paths": ["t\\n.py", "t.py::test[\\n]"]})
    assert test["paths"] == ["t\n.py", "t.py::test[\\n]"]
