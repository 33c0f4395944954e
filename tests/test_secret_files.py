"""A key file is made once, whole and readable by its owner alone; a token is the only line of its file."""

import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from headrace.secret_files import SecretError, read_or_make, token


def test_all_who_come_at_once_read_one_whole_key(tmp_path: Path) -> None:
    contents = [bytes([number]) * 65536 for number in range(8)]
    for turn in range(20):
        path = tmp_path / str(turn) / "key"
        with ThreadPoolExecutor(8) as pool:
            answers = set(pool.map(partial(read_or_make, path), contents))
        assert len(answers) == 1 and answers < set(contents)
        assert [file.name for file in path.parent.iterdir()] == ["key"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_make(path, b"another") in answers


def test_a_token_is_the_only_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc-1\n")
    assert token(str(file), "x") == "abc-1"
    for content, why in ((b"", "got 0"), (b"a\nb\n", "got 2"), (b"\xff", "not UTF-8")):
        file.write_bytes(content)
        with pytest.raises(SecretError, match=why):
            token(str(file), "x")
    with pytest.raises(SecretError, match=r"\[judge\] key: .*/none cannot be read \(No such file"):
        token(str(tmp_path / "none"), "[judge] key")
