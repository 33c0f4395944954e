"""Repositories of rows: files of a commit from a checkout on this machine, and patches applied to them by git."""

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from headrace import timed_commands
from headrace.archives import commits
from headrace.archives.members import ArchiveLimits, ArchiveRefused, ArchiveTooLarge, Member, files_of, safe_path
from headrace.messages.tasks import Change, Entries
from headrace.tasks.importing import patches
from headrace.tasks.importing.base import LARGEST_TREE, ImportRefused
from headrace.vmhost.guest.names import shown

_MOST_FILES = 20_000
_INSTEAD = "import the row with its image instead"
_HISTORY = frozenset({".git", ".hg"})
_CACHES = frozenset({"__pycache__"})
_LFS = b"version https://git-lfs.github.com/spec/"
"""The beginning of a file that stands for a large one, which the commit does not hold."""
_NAMED = 3
"""Paths that a note names."""


class Tree(NamedTuple):
    """The files of a repository, and what their contents do not say."""

    files: dict[str, bytes]
    entries: dict[str, Change]
    """Links, empty folders and executable files by path."""
    notes: tuple[str, ...] = ()
    """Sentences about entries that are left out, with their number and names."""

    @property
    def special(self) -> Entries:
        """The entries as a task holds them."""
        return entries_of(self.entries.values())

    def below(self, folder: str) -> "Tree":
        """The tree with the folder before every path."""
        return Tree(
            {f"{folder}{path}": data for path, data in self.files.items()},
            {
                f"{folder}{path}": Change(f"{folder}{path}", entry.kind, entry.mode, entry.target)
                for path, entry in self.entries.items()
            },
            self.notes,
        )

    def over(self, other: "Tree") -> "Tree":
        """This tree's files and entries over those of another one."""
        entries = {path: entry for path, entry in other.entries.items() if path not in self.files}
        files = {path: data for path, data in other.files.items() if path not in self.entries}
        return Tree(files | self.files, entries | self.entries, tuple(dict.fromkeys((*other.notes, *self.notes))))


class Patched(NamedTuple):
    """The changes that a patch makes to a repository."""

    changed: dict[str, bytes]
    """Files with another content, another mode or another kind."""
    removed: tuple[str, ...]
    entries: dict[str, Change]
    """New links, and files with another mode."""


def entries_of(entries: Iterable[Change]) -> Entries:
    """Entries as a task holds them: sorted, and unset where there is none."""
    return tuple(sorted(entries, key=lambda entry: entry.path)) or UNSET


def find(repos: Path | None, exact: Sequence[str], names: Sequence[str], commit: str) -> Tree | None:
    """The files of a commit: of the first folder of `repos` with one of these names. A git checkout gives its commit; a
    plain folder gives its files where its name says that they are the row's. exact: such names. None without a folder;
    ImportRefused where it lacks the commit or is too large."""
    folder = next((repos / name for name in (*exact, *names) if (repos / name).is_dir()), None) if repos else None
    if folder is None:
        return None
    if (folder / ".git").exists():
        return archive(folder, commit)
    if folder.name not in exact:
        raise ImportRefused(
            f"{folder} is no git checkout, so nothing shows that it holds commit {commit}: use a checkout, or name the "
            f"folder {exact[0]}"
        )
    return read(folder)


def archive(folder: Path, commit: str) -> Tree:
    """The tree of a commit. ImportRefused."""
    if not re.fullmatch(r"[0-9a-fA-F]{7,64}|[A-Za-z0-9._/-]+", commit) or commit.startswith("-"):
        raise ImportRefused(f"expected a commit, got {commit!r}")
    try:
        members = commits.members(folder, commit, ArchiveLimits(_MOST_FILES, LARGEST_TREE), commits.environment())
        files = dict(files_of(members, skip_links=True))
    except ArchiveTooLarge as error:
        raise ImportRefused(f"{folder}, commit {commit}: {error}; {_INSTEAD}") from None
    except ArchiveRefused as error:
        raise ImportRefused(f"{folder}: {error}") from None
    except FileNotFoundError:
        raise _no_git() from None
    entries = {member.name: Change(member.name, "file", 0o755) for member in members if member.kind == "program"}
    links: list[Member] = []
    odd: list[Member] = []
    submodules: list[str] = []
    for member in members:
        if member.kind == "link":
            (links if safe_path(member.name) and _text(member.target) else odd).append(member)
        elif member.kind == "submodule":
            submodules.append(member.name)
    entries |= {member.name: Change(member.name, "link", 0o777, member.target) for member in links}
    notes = [_left_out("submodules", submodules), _left_out("links to other bytes than text", [m.name for m in odd])]
    notes.append(_left_out("contents of files in Git LFS", [path for path in files if files[path].startswith(_LFS)]))
    return Tree(files, entries, tuple(filter(None, notes)))


def read(folder: Path) -> Tree:
    """The tree of a folder, without its history. ImportRefused when it is too many bytes, or where a name is no
    text."""
    files: dict[str, bytes] = {}
    entries: dict[str, Change] = {}
    left_out: dict[str, list[str]] = {}
    size = 0
    for place, folders, names in os.walk(folder):
        at = os.path.relpath(place, folder)
        prefix = "" if at == "." else f"{at}/"
        for kind, skipped in (("folders of history", _HISTORY), ("folders of compiled files", _CACHES)):
            left_out.setdefault(kind, []).extend(f"{prefix}{name}" for name in folders if name in skipped)
        links = [name for name in folders if os.path.islink(f"{place}/{name}")]
        folders[:] = sorted(name for name in folders if name not in _HISTORY | _CACHES and name not in links)
        if not folders and not names and not links and prefix:
            entries[at] = Change(at, "folder", 0o755)
        for name in sorted((*names, *links)):
            path, status = f"{prefix}{name}", os.lstat(f"{place}/{name}")
            if name in _HISTORY:  # of a worktree or a submodule
                left_out["folders of history"].append(path)
            elif not safe_path(path):
                raise ImportRefused(f"{shown(path)!a} is no file name of UTF-8 that a sandbox can have")
            elif stat.S_ISLNK(status.st_mode):
                target = os.readlink(f"{place}/{name}")
                if not _text(target):
                    raise ImportRefused(f"{shown(path)} is a link to other bytes than text")
                entries[path] = Change(path, "link", 0o777, target)
            elif not stat.S_ISREG(status.st_mode):
                left_out.setdefault("pipes, sockets and devices", []).append(path)
            else:
                size += status.st_size
                if size > LARGEST_TREE:
                    raise ImportRefused(f"{folder} holds more than {LARGEST_TREE >> 20} MiB; {_INSTEAD}")
                files[path] = Path(place, name).read_bytes()
                if status.st_mode & 0o100:
                    entries[path] = Change(path, "file", 0o755)
    return Tree(files, entries, tuple(note for kind, paths in left_out.items() if (note := _left_out(kind, paths))))


def _text(target: str) -> bool:
    """Whether a message can carry the target of a link."""
    return target.isascii() or not any("\ud800" <= each <= "\udfff" for each in target)


def _left_out(kind: str, paths: Sequence[str]) -> str:
    """A note with number and names; empty where there is none."""
    if not paths:
        return ""
    names = ", ".join(map(shown, sorted(paths)[:_NAMED]))
    return f"{kind} are left out: {len(paths)}, {names}{' ...' if len(paths) > _NAMED else ''}"


def apply(tree: Tree, patch: str, what: str) -> Patched:
    """The changes that a patch makes to a tree. what: the patch's name in an error. ImportRefused."""
    paths = patches.paths_of(patch)
    if not paths:
        raise ImportRefused(f"{what} is not a git patch: it has no line 'diff --git'")
    if patches.SUBMODULE.search(patch):
        raise ImportRefused(f"{what} changes a submodule, whose content no repository here has")
    if odd := next((path for path in paths if not safe_path(path)), None):
        raise ImportRefused(f"{what} names {odd!a}, expected a path of UTF-8 inside the repository")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        before = _part(tree, paths)
        _write(root, before)
        text = patch if patch.endswith("\n") else patch + "\n"
        done = _git(["apply", "--whitespace=nowarn", "-"], text.encode("utf-8", "surrogateescape"), root)
        if done.returncode:
            raise ImportRefused(f"{what} does not apply: {commits.reason_of(done.stderr)}")
        after = read(root)
    entries: dict[str, Change] = {}
    changed: dict[str, bytes] = {}
    for path in (*after.files, *after.entries):
        old, new = before.entries.get(path), after.entries.get(path)
        if old != new and (new is None or new.kind != "folder"):
            entries[path] = new or Change(path, "file", 0o644)
        if path in after.files and (path in entries or before.files.get(path) != after.files[path]):
            changed[path] = after.files[path]
    gone = before.files.keys() - after.files.keys()  # a file in whose place a link is now was removed before
    gone |= before.entries.keys() - after.files.keys() - after.entries.keys()
    return Patched(changed, tuple(sorted(gone)), entries)


def _part(tree: Tree, paths: Iterable[str]) -> Tree:
    """The files and links at these paths, and links above them, which git has to see."""
    wanted = {*paths, *(str(parent) for path in paths for parent in Path(path).parents)}
    return Tree(
        {path: tree.files[path] for path in wanted if path in tree.files},
        {path: tree.entries[path] for path in wanted if path in tree.entries and tree.entries[path].kind != "folder"},
    )


def _write(root: Path, tree: Tree) -> None:
    for path, content in tree.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        (root / path).chmod(0o755 if path in tree.entries else 0o644)
    for path, entry in tree.entries.items():
        if entry.kind == "link":
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(entry.target)


def with_changes(tree: Tree, patched: Patched) -> Tree:
    """The tree after the patch."""
    gone = {*patched.removed}
    files = {path: data for path, data in tree.files.items() if path not in gone and path not in patched.entries}
    entries = {path: entry for path, entry in tree.entries.items() if path not in gone} | patched.entries
    plain = {path for path, entry in patched.entries.items() if entry.kind == "file" and not entry.mode & 0o100}
    entries = {path: entry for path, entry in entries.items() if path not in plain}
    return Tree(files | patched.changed, entries, tree.notes)


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
