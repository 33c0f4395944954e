"""Recorded encodings of every message type are read as they were written; a change that breaks this is refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from headrace.messages import TYPES
from headrace.messages.base import OLDER, Message, message, older
from tests.test_docs import script

page = script("messages")
golden, incompatible, read, unrecorded = page.golden, page.incompatible, page.read, page.unrecorded
GOLDEN = Path(__file__).with_name("golden.json")


def test_every_recorded_message_is_read_and_encoded_as_it_was() -> None:
    recordings = read(GOLDEN.read_text())
    assert incompatible(recordings) == []
    assert unrecorded(recordings) == [], "run `make docs`"


class Pair(msgspec.Struct, frozen=True, array_like=True):
    first: int
    second: str


class Swapped(msgspec.Struct, frozen=True, array_like=True):
    second: str
    first: int


class Longer(msgspec.Struct, frozen=True, array_like=True):
    first: int
    second: str
    third: float = 0.5


class Sample(Message, frozen=True, kw_only=True):
    count: int
    lane: Literal["train", "eval"]
    pair: Pair
    note: str = ""


class Gone(Message, frozen=True, kw_only=True):
    count: int
    lane: Literal["train", "eval"]
    pair: Pair


class Retyped(Message, frozen=True, kw_only=True):
    count: float
    lane: Literal["train", "eval"]
    pair: Pair
    note: str = ""


class Narrowed(Message, frozen=True, kw_only=True):
    count: int
    lane: Literal["train"]
    pair: Pair
    note: str = ""


class Reordered(Message, frozen=True, kw_only=True):
    count: int
    lane: Literal["train", "eval"]
    pair: Swapped
    note: str = ""


class Demanding(Message, frozen=True, kw_only=True):
    count: int
    lane: Literal["train", "eval"]
    pair: Pair
    note: str = ""
    added: int


class Grown(Message, frozen=True, kw_only=True):
    count: int
    lane: Literal["train", "eval", "shadow"]
    pair: Longer
    note: str = ""
    added: int = 7


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with the recordings of all types, `golden_in_test` among them."""
    path = tmp_path_factory.mktemp("golden") / "golden.json"
    message("golden_in_test")(Sample)
    try:
        assert golden(path) == 0
    finally:
        del TYPES["golden_in_test"]
    return path.read_bytes()


@pytest.fixture
def recorded(written: bytes, tmp_path: Path) -> Iterator[Path]:
    """A copy of that file; the test registers its own `golden_in_test`."""
    path = tmp_path / "golden.json"
    path.write_bytes(written)
    yield path
    TYPES.pop("golden_in_test", None)
    OLDER.pop(("golden_in_test", 1), None)


def test_a_type_without_a_recording_is_named(recorded: Path) -> None:
    message("golden_in_test")(Sample)
    assert unrecorded(read(GOLDEN.read_text())) == ["golden_in_test/1"]
    assert unrecorded(read(recorded.read_text())) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (None, "unknown message type"),
        (Gone, r"\.note is gone"),
        (Retyped, r"\.count was \d+ and is \d+\.0"),
        (Narrowed, "Invalid enum value 'eval'"),
        (Reordered, r"Expected `str`, got `int` - at `\$\.pair"),
        (Demanding, "missing required field `added`"),
    ],
)
def test_an_incompatible_change_is_refused_and_the_file_stays(
    recorded: Path, changed: type[Message] | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recorded.read_bytes()
    if changed is not None:
        message("golden_in_test")(changed)
    capsys.readouterr()
    assert golden(recorded) == 1
    (problem,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"golden_in_test/1: .*{says}", problem)
    assert recorded.read_bytes() == before


def test_a_compatible_change_is_added_beside_the_earlier_recording(recorded: Path) -> None:
    message("golden_in_test")(Grown)
    assert unrecorded(read(recorded.read_text())) == ["golden_in_test/1"]
    assert golden(recorded) == 0
    recordings = read(recorded.read_text())
    assert len(recordings["golden_in_test/1"]) == 2
    assert incompatible(recordings) == [] and unrecorded(recordings) == []


def test_a_raised_version_needs_an_upgrade_of_the_one_before(recorded: Path) -> None:
    message("golden_in_test", version=2)(Demanding)
    (problem,) = incompatible(read(recorded.read_text()))
    assert "missing required field `added`" in problem
    older(Demanding, 1, Sample, lambda was: Demanding(**msgspec.structs.asdict(was), added=0))
    assert golden(recorded) == 0
    assert {"golden_in_test/1", "golden_in_test/2"} <= set(read(recorded.read_text()))


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "golden.json"
    path.write_text('{"ack/1": [["zz"]]}')
    assert golden(path) == 2
    assert "does not contain recorded messages" in capsys.readouterr().err
