"""A key file is made once, whole and readable by its owner alone."""

import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from headrace.secret_files import read_or_make


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
