"""Users and groups of an image: files that its author chose, read without waiting and within bounds."""

import os
from pathlib import Path

import pytest

from headrace.vmhost.guest.boot.images import _id, _rows
from headrace.vmhost.guest.walks import OperationError


def test_rows_of_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_bytes(b"root:x:0:0::/root:/bin/sh\n\xff\xfe:x\nlast:x:7")
    assert _rows(str(path)) == [["root", "x", "0", "0", "", "/root", "/bin/sh"], ["��", "x"], ["last", "x", "7"]]


@pytest.mark.timeout(20)
def test_whatever_stands_in_its_place_has_no_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "loop", "device", "missing"):
        assert _rows(str(tmp_path / name)) == [], name


def test_a_large_file_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    with path.open("wb") as file:
        file.write(b"root:x:0:0::/root:/bin/sh\n")
        file.truncate(1 << 34)
    assert _rows(str(path))[0][0] == "root"


@pytest.mark.parametrize("text", ["", "-1", "²", "1e3", " 7", "4294967295", "9" * 5000])
def test_no_number_of_a_user(text: str) -> None:
    with pytest.raises(OperationError, match="is not the number of a user or group"):
        _id(text)
    assert _id("4294967294") == 4294967294
