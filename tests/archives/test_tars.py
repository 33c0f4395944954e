"""Any bytes are a tar within the limits or are refused in one sentence."""

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.archives import tars
from headrace.archives.members import (
    ArchiveLimits,
    ArchiveRefused,
    ArchiveTooLarge,
    both_file_and_folder,
    files_of,
    safe_path,
)
from tests.support import forged

LIMITS = ArchiveLimits(10_000, 6 << 20)
SMALL = ArchiveLimits(8, 4096)


def read(data: bytes, limits: ArchiveLimits = LIMITS, skip_links: bool = False) -> dict[str, bytes]:
    return dict(files_of(tars.members(io.BytesIO(data), limits), skip_links=skip_links))


@pytest.mark.parametrize("what", forged.TARS)
def test_a_forged_tar_is_refused_in_one_sentence_and_little_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveRefused) as refused:
            read(forged.TARS[what])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_tar_is_read_whole(pack: Callable[[bytes], bytes]) -> None:
    plain = forged.pax(b"g", comment="x") + forged.pax(path="long/" * 40 + "n") + forged.file(b"a", b"2" * 70_000)
    plain += forged.header(b"./d/", 0, b"5") + forged.file(b"./d/e", b"") + forged.END
    expected = {"long/" * 40 + "n": b"2" * 70_000, "d/e": b""}
    assert read(pack(plain)) == expected
    if pack is not bytes:
        halves = pack(plain[:3000]) + pack(plain[3000:]) + bytes(100)
        assert read(halves) == expected, "several streams in a row are one file"


def test_links_are_refused_or_skipped() -> None:
    data = forged.file(b"a") + forged.header(b"l", 0, b"2", b"/etc") + forged.END
    assert read(data, skip_links=True) == {"a": b"1"}
    with pytest.raises(ArchiveRefused, match="link or a device"):
        read(data)


def test_the_limits_are_exact() -> None:
    files = [forged.file(b"%d" % n, bytes(512)) for n in range(9)]
    assert len(read(b"".join(files[:8]) + forged.END, SMALL)) == 8
    with pytest.raises(ArchiveTooLarge, match="more than 8 files"):
        read(b"".join([*files[:8], forged.file(b"8", b"")]) + forged.END, SMALL)
    with pytest.raises(ArchiveTooLarge, match="unpacks to more than"):
        read(forged.file(b"a", bytes(4097)) + forged.END, SMALL)
    folders = forged.header(b"d/", 0, b"5")
    assert read(folders * 27 + forged.END, SMALL) == {}
    with pytest.raises(ArchiveTooLarge, match="files and folders"):
        read(folders * 41 + forged.END, ArchiveLimits(10, 1 << 20))
    with pytest.raises(ArchiveTooLarge, match="headers included"):
        read(folders * 33 + forged.END, SMALL)


def test_no_sandbox_is_asked_for_a_file_and_a_folder_of_one_name() -> None:
    assert both_file_and_folder(["a.b", "a", "a-b/c", "b/c", "a/b/c"]) == "a"
    assert both_file_and_folder(["a.b", "a-b/c", "ab", "b/c", "b/d", "a/b"]) is None


headers = st.builds(
    forged.header,
    st.binary(max_size=20) | st.sampled_from([b"a", b"a/b", b"../a", b"d/", b"\xff"]),
    st.integers(-2000, 6000) | st.sampled_from([1 << 40, -(1 << 40), (1 << 87) - 1]),
    st.sampled_from([bytes([kind]) for kind in b"0\x001234567LKxgSNVXDq"]),
    st.binary(max_size=10),
    st.binary(max_size=167),
)
fields = [
    "path",
    "size",
    "linkpath",
    "hdrcharset",
    "mtime",
    "GNU__sparse__map",
    "GNU__sparse__major",
    "GNU__sparse__name",
]
fields += ["GNU__sparse__minor", "GNU__sparse__size", "GNU__sparse__realsize", "GNU__sparse__numblocks", "comment"]
values = st.binary(max_size=30) | st.sampled_from(
    [b"-1", b"1", b"0", b"BINARY", b"0,1,5,2", b"9" * 5000, b"inf", b"nan"]
)
extended = st.dictionaries(st.sampled_from(fields), values, max_size=5).map(lambda records: forged.pax(**records))
files = st.builds(forged.file, st.binary(min_size=1, max_size=20), st.binary(max_size=1500))
parts = st.lists(headers | extended | files | st.binary(max_size=600).map(forged.padded), max_size=8).map(b"".join)
PACKERS: list[Callable[[bytes], bytes]] = [bytes, bytes, bytes, gzip.compress, bz2.compress, lzma.compress]


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(PACKERS))(draw(parts) + draw(st.sampled_from([b"", bytes(512), forged.END]))))
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=2)):
        if data:
            data[at % len(data)] = byte
    return bytes(data[: draw(st.none() | st.integers(0, 6000))])


def holds(data: bytes) -> None:
    try:
        read_files = list(files_of(tars.members(io.BytesIO(data), SMALL), skip_links=True))
    except ArchiveRefused as error:
        assert str(error)
        return
    assert len(read_files) <= SMALL.files and sum(len(content) for _, content in read_files) <= SMALL.size
    assert all(safe_path(path) for path, _ in read_files)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(archives())
def test_any_bytes_are_files_within_the_limits_or_one_refusal(data: bytes) -> None:
    holds(data)


@pytest.mark.slow
@settings(max_examples=30_000, deadline=None, database=None)
@given(archives())
def test_very_many_bytes_are_files_within_the_limits_or_one_refusal(data: bytes) -> None:
    holds(data)


def test_a_folder_is_packed_with_modes_and_links_and_without_owners(tmp_path: Path) -> None:
    (tmp_path / "tool").write_bytes(b"x")
    (tmp_path / "tool").chmod(0o750)
    (tmp_path / "same").symlink_to("tool")
    with tarfile.open(fileobj=io.BytesIO(tars.packed(tmp_path))) as tar:
        found = {each.name: (each.mode & 0o777, each.linkname, each.uid, each.mtime) for each in tar}
    assert found["tool"] == (0o750, "", 0, 0) and found["same"][1] == "tool"
