"""Downloads and archives of packages: what takes too long, is damaged, leaves its folder or would fill the disk is
refused in one sentence."""

import io
import os
import socket
import tarfile
import zipfile
from pathlib import Path

import pytest

from headrace.tasks.packages import fetch
from headrace.tasks.packages.fetch import PackageError, read, unpack


def member(name: str, size: int = 1, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type = size, kind
    return made


def packed(folder: Path, *members: tarfile.TarInfo) -> Path:
    archive = folder / "p.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for each in members:
            tar.addfile(each, io.BytesIO(bytes(each.size)))
    return archive


def test_an_index_that_never_answers_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        monkeypatch.setattr(fetch, "PIP_S", 0.3)
        with pytest.raises(PackageError, match=r"^pip did not download p==1 within 0\.3 s: .* --path$"):
            fetch.fetch("p==1", tmp_path)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "p/../../x"])
def test_a_member_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageError, match=r"p\.tar\.gz cannot be unpacked: .* leaves the folder"):
        unpack(packed(tmp_path, member("p/a.py"), member(name)), tmp_path / "out")


def test_links_and_devices_are_left_out(tmp_path: Path) -> None:
    link = member("p/link", 0, tarfile.SYMTYPE)
    link.linkname = "/etc/passwd"
    root = unpack(packed(tmp_path, member("p/a.py"), link, member("p/pipe", 0, tarfile.FIFOTYPE)), tmp_path / "out")
    assert [path.name for path in root.iterdir()] == ["a.py"]


def test_archives_that_would_fill_the_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_UNPACKED_LIMIT", 1 << 20)
    tar = packed(tmp_path, member("p/a", 1 << 19), member("p/b", 1 << 20))
    with zipfile.ZipFile(tmp_path / "p.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/a", bytes(2 << 20))
    for number, path in enumerate((tar, tmp_path / "p.zip")):
        with pytest.raises(PackageError, match="unpacks to more than 1 MiB"):
            unpack(path, tmp_path / f"out{number}")
        assert not [*tmp_path.glob(f"out{number}/p/b")], "it is refused before the bytes are written"


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = packed(tmp_path, member("p/a", 1 << 16), member("p/b", 1 << 16)).read_bytes()
    with zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/a", bytes(1 << 16))
    zipped = (tmp_path / "z").read_bytes()
    damaged = [
        whole[:60],
        whole[:-60],
        whole[:40] + b"\xff" * 40 + whole[80:],
        b"",
        b"no archive",
        b"BZh9",
        b"\xfd7zXZ\0",
    ]
    for number, data in enumerate(damaged):
        (tmp_path / f"d{number}.tar.gz").write_bytes(data)
        with pytest.raises(PackageError, match=f"d{number}.tar.gz cannot be unpacked"):
            unpack(tmp_path / f"d{number}.tar.gz", tmp_path / f"damaged{number}")
    for number, data in enumerate([zipped[:50], zipped.replace(zipped[45:60], b"\xff" * 15), b""]):
        (tmp_path / f"d{number}.zip").write_bytes(data)
        with pytest.raises(PackageError, match=f"d{number}.zip cannot be unpacked"):
            unpack(tmp_path / f"d{number}.zip", tmp_path / f"zip{number}")


def test_a_large_tree_keeps_its_python_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_bytes(b"")
    (tmp_path / "tests" / "data.bin").write_bytes(b"x")
    for number in range(6):
        (tmp_path / f"m{number}.py").write_bytes(bytes(1 << 20))
    assert "tests/data.bin" not in read(tmp_path, "p").files, "over 6 MiB"
    (tmp_path / "m0.py").write_bytes(b"")
    assert "tests/data.bin" in read(tmp_path, "p").files
    for number in range(17):
        (tmp_path / f"m{number}.py").write_bytes(bytes(1 << 20))
    with pytest.raises(PackageError, match="p is larger than 16 MiB of Python"):
        read(tmp_path, "p")
