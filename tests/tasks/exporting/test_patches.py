"""An attempt's changes as a git patch: git applies it, and the files are the attempt's."""

import os
import subprocess
from pathlib import Path

import msgspec

from headrace.messages.sandbox import Change
from headrace.tasks.exporting.patches import patch
from tests.support.judging import TASK, trajectory

BEFORE = {"kept.py": b"a = 1\n", "old.py": b"x\r\ny\r\n", "gone.py": b"no end of line", "data.bin": bytes(range(256))}
AFTER = {
    "old.py": b"x\r\nz\r\n",
    "data.bin": bytes(range(255, -1, -1)),
    "new/ name.py": b"b\n",
    ".gitattributes": b"* text=auto eol=lf\n",
}


def applied(folder: Path, before: dict[str, bytes], text: bytes) -> dict[str, bytes]:
    """The files of a repository after `git apply`."""
    for path, content in before.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, input=text, check=True)
    paths = (path for path in folder.rglob("*") if ".git" not in path.parts and (path.is_file() or path.is_symlink()))
    return {
        str(path.relative_to(folder)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in paths
    }


def test_git_applies_the_patch_of_an_attempt(tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, files=BEFORE)
    text, left_out = patch(task, trajectory("r", "g", AFTER, deleted=("gone.py",)))
    assert left_out == ()
    assert applied(tmp_path, BEFORE, text) == {"kept.py": b"a = 1\n", **AFTER}


def test_the_patch_of_an_image_has_links_and_modes_and_names_what_it_lacks(tmp_path: Path) -> None:
    changes = (
        Change("old.py", "file", 0o644),
        Change("run.sh", "file", 0o755),
        Change("mode.sh", "file", 0o755),
        Change("link", "link", 0o777, "old.py"),
        Change("lost.py", "gone", 0),
        Change("/etc/motd", "file", 0o644),
    )
    diff = {"old.py": b"2\n", "run.sh": b"#!/bin/sh\n", "/etc/motd": b"hello\n", "mode.sh": b"3\n"}
    task = msgspec.structs.replace(TASK, files={}, image="app:1")
    made = trajectory(
        "r", "g", diff, deleted=("lost.py",), changes=changes, originals={"old.py": b"1\n", "mode.sh": b"3\n"}
    )
    text, left_out = patch(task, made)
    assert sorted(left_out) == ["/etc/motd", "lost.py"]
    files = applied(tmp_path, made.originals, text)
    assert files == {"old.py": b"2\n", "run.sh": b"#!/bin/sh\n", "link": b"old.py", "mode.sh": b"3\n"}
    programs = [path for path in sorted(files) if (tmp_path / path).lstat().st_mode & 0o111 == 0o111]
    assert programs == ["link", "mode.sh", "run.sh"]


def test_the_patch_of_a_task_with_files_knows_their_modes_and_links(tmp_path: Path) -> None:
    files = {"run.sh": b"1\n", "plain.sh": b"2\n", "more.sh": b"3\n"}
    entries = (
        Change("run.sh", "file", 0o755),
        Change("more.sh", "file", 0o755),
        Change("link", "link", 0o777, "run.sh"),
    )
    task = msgspec.structs.replace(TASK, files=files, entries=entries)
    changes = (Change("more.sh", "file", 0o644), Change("plain.sh", "file", 0o755), Change("link", "file", 0o644))
    diff = {"run.sh": b"4\n", "plain.sh": b"2\n", "more.sh": b"3\n", "link": b"a file now\n"}
    text, left_out = patch(task, trajectory("r", "g", diff, changes=changes))
    assert left_out == ()
    for path, content in files.items():
        (tmp_path / path).write_bytes(content)
    (tmp_path / "link").symlink_to("run.sh")
    for path in ("run.sh", "more.sh"):
        (tmp_path / path).chmod(0o755)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=text, check=True)
    assert {path: (tmp_path / path).read_bytes() for path in diff} == diff and not (tmp_path / "link").is_symlink()
    modes = {path: (tmp_path / path).stat().st_mode & 0o111 for path in diff}
    assert modes == {"run.sh": 0o111, "plain.sh": 0o111, "more.sh": 0, "link": 0}
