"""An attempt's changes as a git patch, which `git apply` and SWE-bench's evaluation read.

Git compares two trees of a repository of its own without a working tree, so neither attributes of the files nor a
configuration changes a byte. Binary files, modes and links are in the patch. The former content of a changed file comes
from the task, or from the trajectory of a task in an image, which holds it up to `PullChanges.originals` bytes.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace import timed_commands
from headrace.archives import commits
from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import Task

_FILE, _PROGRAM, _LINK = "100644", "100755", "120000"


class Patch(NamedTuple):
    """A patch, and the paths of changes that it cannot hold: outside the repository, or of unknown removed content."""

    text: bytes
    left_out: tuple[str, ...]


Tree = dict[str, tuple[str, bytes]]
"""Path to mode and content."""


def patch(task: Task, made: Trajectory) -> Patch:
    """The patch of an attempt at a task. ValueError when git is missing or refuses a path."""
    known = {**made.originals, **task.files}
    entries = {entry.path: entry for entry in task.entries or ()}
    before: Tree = {}
    after: Tree = {}
    left_out = []
    changes = {change.path: change for change in made.changes}
    for path in (*made.diff, *made.deleted, *changes):
        if path.startswith("/"):
            left_out.append(path)
            continue
        change = changes.get(path)
        entry = entries.get(path)
        if path in known:
            before[path] = _PROGRAM if entry is not None and entry.kind == "file" else _FILE, known[path]
        elif entry is not None:
            if entry.kind == "link":
                before[path] = _LINK, entry.target.encode("utf-8", "surrogateescape")
        elif path in made.deleted or (change is not None and change.kind == "gone"):
            left_out.append(path)
        if change is not None and change.kind == "link":
            after[path] = _LINK, change.target.encode("utf-8", "surrogateescape")
        elif path in made.diff:
            mode = before[path][0] if path in before and change is None else _FILE
            mode = _FILE if mode == _LINK else mode
            after[path] = _PROGRAM if change is not None and change.mode & 0o100 else mode, made.diff[path]
    # The mode that a file of an image had is not recorded.
    for path in (before.keys() & after.keys()) - task.files.keys() - entries.keys():
        mode, content = after[path]
        if mode != _LINK:
            only_mode = path in changes and content == before[path][1]
            other = _FILE if mode == _PROGRAM else _PROGRAM
            before[path] = other if only_mode else mode, before[path][1]
    return Patch(_difference(before, after), tuple(dict.fromkeys(left_out)))


def _difference(before: Tree, after: Tree) -> bytes:
    with tempfile.TemporaryDirectory(prefix="headrace-patch-") as name:
        env = commits.environment() | {"GIT_ATTR_NOSYSTEM": "1", "HOME": name, "XDG_CONFIG_HOME": name}
        git = _Git(Path(name), env)
        git("init", "-q", "--bare", ".")
        trees = [git.tree(files) for files in (before, after)]
        words = ("--no-renames", "--no-ext-diff", "--no-textconv", "--binary", "--full-index")
        return git("diff-tree", "-r", "-p", *words, *trees)


class _Git:
    """Git in a bare repository of its own."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder, self._env = folder, env

    def __call__(self, *words: str, data: bytes = b"") -> bytes:
        """Output of a command. ValueError."""
        try:
            done = timed_commands.run(
                commits.command(self._folder, *words), commits.GIT_S, cwd=self._folder, env=self._env, data=data
            )
        except FileNotFoundError:
            raise ValueError("git is not installed, which writes patches: install git") from None
        if done.returncode:
            raise ValueError(f"git {words[0]}: {commits.reason_of(done.stderr)}")
        return done.stdout

    def tree(self, files: Tree) -> str:
        """The id of a tree with these files."""
        rows = []
        for path, (mode, content) in files.items():
            id = self("hash-object", "-w", "--no-filters", "--stdin", data=content).strip()
            rows.append(b"%b %b\t%b\0" % (mode.encode(), id, path.encode("utf-8", "surrogateescape")))
        self("read-tree", "--empty")
        self("update-index", "-z", "--index-info", data=b"".join(rows))
        return self("write-tree").decode().strip()
