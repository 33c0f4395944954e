"""A location names only objects that a manifest can name, and each appears whole or not at all: as files, and in S3."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import Weights
from headrace.weights.full.location import Location, NoSnapshot
from headrace.weights.state import WeightError
from tests.support.s3 import NEEDS_S3, bucket

A, B = f"3-{'ab' * 16}.chunks", f"12-{'cd' * 16}.chunks"


@pytest.fixture(params=["folder", pytest.param("s3", marks=NEEDS_S3)])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    """An empty location."""
    if request.param == "folder":
        yield Location(str(tmp_path / "far" / "r1"))
        return
    with bucket(monkeypatch) as url:
        yield Location(f"{url}/prefix/r1")


def test_an_object_is_stored_whole_found_read_and_removed(location: Location, tmp_path: Path) -> None:
    assert location.versions() == {} and location.size(A) is None
    data = bytes(range(256)) * 40_000
    for name in (A, B):
        file = tmp_path / "file"
        file.write_bytes(data)
        location.put(file, name)
        assert not file.exists()
    assert location.versions() == {A: 3, B: 12} and location.size(A) == len(data)
    assert location.read(A, 255, 300_000) == data[255:300_000]
    with pytest.raises(NoSnapshot, match="gave 10 bytes, expected 20"):
        location.read(A, len(data) - 10, len(data) + 10)
    other = Location(location.url)
    location.remove(A)
    location.remove(A)
    assert other.versions() == {B: 12} and other.size(A) is None
    with pytest.raises(NoSnapshot, match="cannot read"):
        other.read(A, 0, 10)


@pytest.mark.parametrize(
    "name", ["", "../3-" + "ab" * 16, "3", f"/{A}", f"x/{A}", f"{A}/..", f"-1-{'ab' * 16}.chunks", f"{A}\n", A.upper(),
             f"\uff13-{'ab' * 16}.chunks", f"3-{'ab' * 15}..chunks", f"3::{A}"]
)  # fmt: skip
def test_a_name_that_no_manifest_gives_is_refused(name: str, tmp_path: Path) -> None:
    place = Location(str(tmp_path))
    for call in (place.size, place.remove, lambda name: place.read(name, 0, 1), lambda name: place.put(tmp_path, name)):
        with pytest.raises(NoSnapshot, match="is no name of a full snapshot"):
            call(name)


def test_a_run_is_one_folder_of_the_url(tmp_path: Path) -> None:
    at = Location.of_run(Weights(full_snapshots_url="s3://bucket/prefix/"), tmp_path / "r1")
    assert at.url == "s3://bucket/prefix/r1"
    assert Location.of_run(Weights(), tmp_path / "r1").url == f"{tmp_path}/r1/full_snapshots"
    for run in ("..", "a::b", "A", "a b"):
        with pytest.raises(WeightError, match="expected a run id"):
            Location.of_run(Weights(full_snapshots_url="s3://bucket"), Path("runs") / run)


def test_a_reader_never_sees_a_part_of_an_object(tmp_path: Path) -> None:
    place, stop = Location(str(tmp_path / "far")), threading.Event()
    sizes: set[int | None] = set()

    def look() -> None:
        while not stop.is_set():
            sizes.add(place.size(A))

    watching = threading.Thread(target=look)
    watching.start()
    file = tmp_path / "file"
    try:
        for _ in range(20):
            file.write_bytes(bytes(1 << 21))
            place.put(file, A)
    finally:
        stop.set()
        watching.join()
    assert sizes <= {None, 1 << 21} and 1 << 21 in sizes
    assert [path.name for path in (tmp_path / "far").iterdir()] == [A]
