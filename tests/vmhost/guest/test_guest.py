"""Guest parts that need no machine: globs, frames, archives."""

import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.vmhost.guest import frames as wire
from headrace.vmhost.guest.frames import Garbage, Reader, pack
from headrace.vmhost.guest.globs import matches
from headrace.vmhost.images import cpio


@pytest.mark.parametrize(
    ("pattern", "path", "free", "anchored"),
    [
        ("**", "a/b.py", True, True),
        ("*.py", "b.py", True, True),
        ("*.py", "a/b.py", True, False),
        ("b.py", "a/b.py", True, False),
        ("a/*.py", "a/b.py", True, True),
        ("a/*.py", "a/c/b.py", False, False),
        ("a/**", "a/c/b.py", True, True),
        ("a/**", "ab/c", False, False),
        ("**/b.py", "b.py", True, True),
        ("**/b.py", "x/y/b.py", True, True),
        ("a/**/b.py", "a/b.py", True, True),
        ("a/**/b.py", "a/x/y/b.py", True, True),
        ("a/**/b.py", "a/x/y/c.py", False, False),
        ("a?c", "abc", True, True),
        ("a*c*e", "abcde", True, True),
        ("a*c*e", "abcd", False, False),
        ("", "a", False, False),
    ],
)
def test_globs(pattern: str, path: str, free: bool, anchored: bool) -> None:
    assert matches(pattern, path) is free
    assert matches(pattern, path, anchored=True) is anchored


def test_frames_survive_any_cut() -> None:
    frames: list[tuple[dict[str, Any], list[bytes]]] = [({"i": 1, "text": "ü\n"}, [b"", b"\0" * 70]), ({"i": 2}, [])]
    data = b"".join(pack(header, bodies) for header, bodies in frames)
    for cut in range(len(data)):
        reader = Reader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == frames


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio itself is the witness")
def test_a_clones_first_words_are_no_frame() -> None:
    words = wire.start(1, bytes(range(32)))
    assert words[:8] == wire.START and len(words) == wire.START_SIZE
    assert words[8:16] == (1).to_bytes(8, "little")
    assert words[16:] == (256).to_bytes(4, "little") + (32).to_bytes(4, "little") + bytes(range(32))
    with pytest.raises(Garbage):
        Reader().feed(words)
    assert Reader().feed(wire.STARTED) == [({"i": 0}, [])]


def test_archives_are_read_by_cpio(tmp_path: Path) -> None:
    out = io.BytesIO()
    entries = [cpio.folder("d"), cpio.file("d/a", b"hello", 0o755), cpio.link("d/l", "a")]
    cpio.write(out, entries)
    done = subprocess.run(["cpio", "-i", "--quiet"], input=out.getvalue(), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "d/a").read_bytes() == b"hello" and (tmp_path / "d/a").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "d/l").readlink() == Path("a")
