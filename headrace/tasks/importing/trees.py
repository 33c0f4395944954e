"""Repositories of rows: files of a commit from a checkout on this machine, and patches applied to them by git."""

import io
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.tasks.importing.base import LARGEST_TREE, ImportRefused

_HEADER = re.compile(r"^diff --git a/(.*?) b/(.*)$", re.MULTILINE)
_RENAME = re.compile(r"^rename from (.*)$", re.MULTILINE)
_SKIP = frozenset({".git", "__pycache__", ".hg", ".tox", "node_modules"})


class Patched(NamedTuple):
    """The changes that a patch makes to a repository."""

    changed: dict[str, bytes]
    removed: tuple[str, ...]


def find(repos: Path | None, names: tuple[str, ...], commit: str) -> dict[str, bytes] | None:
    """The files of a commit: of the first folder of `repos` with one of these names. A git checkout gives its commit, a
    plain folder its files. None without such a folder; ImportRefused where it lacks the commit or is too large."""
    folder = next((repos / name for name in names if (repos / name).is_dir()), None) if repos else None
    if folder is None:
        return None
    return archive(folder, commit) if (folder / ".git").exists() else read(folder)


def archive(folder: Path, commit: str) -> dict[str, bytes]:
    """The files of a commit. ImportRefused."""
    if not re.fullmatch(r"[0-9a-fA-F]{7,64}|[A-Za-z0-9._/-]+", commit) or commit.startswith("-"):
        raise ImportRefused(f"expected a commit, got {commit!r}")
    listed = _git(["-C", str(folder), "ls-tree", "-r", "-l", "-z", commit], b"")
    if listed.returncode:
        raise ImportRefused(f"{folder} has no commit {commit}: {_last(listed.stderr)}")
    # Their sizes first: the archive of a repository may be larger than this machine's memory.
    sizes = [line.split()[3] for line in listed.stdout.split(b"\0") if line]
    _bounded({}, folder, sum(int(size) for size in sizes if size.isdigit()))
    done = _git(["-C", str(folder), "archive", "--format=tar", commit], b"")
    if done.returncode:
        raise ImportRefused(f"{folder}, commit {commit} cannot be read: {_last(done.stderr)}")
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                files[member.name] = file.read()
    return files


def read(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder. ImportRefused when they are too many bytes."""
    files: dict[str, bytes] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_symlink() or not path.is_file() or not _SKIP.isdisjoint(parts):
            continue
        size += path.stat().st_size
        if size > LARGEST_TREE:
            break
        files["/".join(parts)] = path.read_bytes()
    return _bounded(files, folder, size)


def _bounded(files: dict[str, bytes], folder: Path, size: int = 0) -> dict[str, bytes]:
    if max(size, sum(map(len, files.values()))) > LARGEST_TREE:
        raise ImportRefused(f"{folder} holds more than {LARGEST_TREE >> 20} MiB; import the row with its image instead")
    return files


def paths_of(patch: str) -> tuple[str, ...]:
    """The paths that a patch names, old and new ones."""
    pairs = _HEADER.findall(patch)
    return tuple(dict.fromkeys([*(path for pair in pairs for path in pair), *_RENAME.findall(patch)]))


def apply(files: Mapping[str, bytes], patch: str, what: str, *, reverse: bool = False) -> Patched:
    """The changes that a patch makes to these files. what: the patch's name in an error. ImportRefused."""
    paths = paths_of(patch)
    if not paths:
        raise ImportRefused(f"{what} is not a git patch: it has no line 'diff --git'")
    if re.search(r"^(?:new file|new|old) mode 120000|^index \S+ 1[26]0000$", patch, re.MULTILINE):
        raise ImportRefused(f"{what} changes a symbolic link or a submodule")
    if any(path.startswith("/") or ".." in path.split("/") for path in paths):
        raise ImportRefused(f"{what} names a path outside the repository")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        before = {path: files[path] for path in paths if path in files}
        for path, content in before.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        text = patch if patch.endswith("\n") else patch + "\n"
        arguments = ["apply", "--whitespace=nowarn", *(["--reverse"] if reverse else []), "-"]
        done = _git(arguments, text.encode("utf-8", "surrogateescape"), root)
        if done.returncode:
            raise ImportRefused(f"{what} does not apply: {_last(done.stderr)}")
        after = {"/".join(p.relative_to(root).parts): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    changed = {path: content for path, content in after.items() if before.get(path) != content}
    return Patched(changed, tuple(sorted(before.keys() - after.keys())))


def with_changes(files: Mapping[str, bytes], patched: Patched) -> dict[str, bytes]:
    """The files after the patch."""
    return {path: content for path, content in files.items() if path not in patched.removed} | patched.changed


def _git(arguments: list[str], data: bytes, folder: Path | None = None) -> "subprocess.CompletedProcess[bytes]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    if folder is not None:
        environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    try:
        return subprocess.run(["git", *arguments], cwd=folder, input=data, env=environment, capture_output=True)
    except FileNotFoundError:
        raise ImportRefused("git is not installed and applies the patches: install git") from None


def _last(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else "git gave no reason"
