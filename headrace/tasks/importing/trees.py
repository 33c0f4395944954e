"""Repositories of rows: files of a commit from a checkout on this machine, and patches applied to them by git."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace import timed_commands
from headrace.archives import commits
from headrace.archives.members import ArchiveRefused, ArchiveTooLarge, Limits, files_of
from headrace.tasks.importing.base import LARGEST_TREE, ImportRefused

_HEADER = re.compile(r"^diff --git a/(.*?) b/(.*)$", re.MULTILINE)
_RENAME = re.compile(r"^rename from (.*)$", re.MULTILINE)
_MOST_FILES = 20_000
_INSTEAD = "import the row with its image instead"
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
    try:
        members = commits.members(folder, commit, Limits(_MOST_FILES, LARGEST_TREE), commits.environment())
        return dict(files_of(members, skip_links=True))
    except ArchiveTooLarge as error:
        raise ImportRefused(f"{folder}, commit {commit}: {error}; {_INSTEAD}") from None
    except ArchiveRefused as error:
        raise ImportRefused(f"{folder}: {error}") from None
    except FileNotFoundError:
        raise _no_git() from None


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
        raise ImportRefused(f"{folder} holds more than {LARGEST_TREE >> 20} MiB; {_INSTEAD}")
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
            raise ImportRefused(f"{what} does not apply: {commits.reason_of(done.stderr)}")
        after = {"/".join(p.relative_to(root).parts): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    changed = {path: content for path, content in after.items() if before.get(path) != content}
    return Patched(changed, tuple(sorted(before.keys() - after.keys())))


def with_changes(files: Mapping[str, bytes], patched: Patched) -> dict[str, bytes]:
    """The files after the patch."""
    return {path: content for path, content in files.items() if path not in patched.removed} | patched.changed


def _git(arguments: list[str], data: bytes, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    # The files may look like a repository with a configuration, which may name programs.
    environment = commits.environment() | {"GIT_DIR": commits.NO_REPOSITORY}
    try:
        return timed_commands.run(["git", *arguments], commits.GIT_S, cwd=folder, env=environment, data=data)
    except subprocess.TimeoutExpired:
        raise ImportRefused(
            f"git {arguments[0]} did not end within {commits.GIT_S:g} s: leave this task out, or import it "
            "on a machine with less load"
        ) from None
    except FileNotFoundError:
        raise _no_git() from None


def _no_git() -> ImportRefused:
    return ImportRefused("git is not installed, which reads commits and applies patches: install git")
