"""Compares the work of several agents on one base: changed files, hunks, and overlaps.

`git diff --no-index` finds the hunks; it reads two folders and needs no repository.
"""

import asyncio
import re
import tempfile
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from headrace.gateway.agents.git_files import run_git, write_files

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
DIFF_CHARS = 65536
"""The most characters of one file's diff in a comparison; a longer diff is cut and marked with ``diffCut``."""

Files = Mapping[str, bytes]


class FileDiff(NamedTuple):
    """The changes of one file."""

    path: str
    status: str
    """``added``, ``deleted`` or ``modified``."""
    hunks: tuple[tuple[int, int], ...]
    """First and last line in the base, of each hunk without context; an insertion after line n is (n, n)."""
    added: int
    removed: int
    binary: bool
    diff: str

    def view(self) -> dict[str, Any]:
        """The diff as a JSON object."""
        view = {"path": self.path, "status": self.status, "hunks": len(self.hunks), "binary": self.binary}
        view |= {"linesAdded": self.added, "linesRemoved": self.removed, "diff": self.diff[:DIFF_CHARS]}
        return view | ({"diffCut": True} if len(self.diff) > DIFF_CHARS else {})


def changed_paths(base: Files, files: Files) -> list[str]:
    """Paths whose content differs."""
    return sorted(path for path in base.keys() | files.keys() if base.get(path) != files.get(path))


async def file_diffs(base: Files, files: Files) -> list[FileDiff]:
    """The changed files. AgentRefused when the gateway has no git."""
    return await asyncio.to_thread(_file_diffs, base, files)


def _file_diffs(base: Files, files: Files) -> list[FileDiff]:
    paths = changed_paths(base, files)
    if not paths:
        return []
    with tempfile.TemporaryDirectory() as folder:
        # Files are named by numbers, so that no user's path reaches git or the disk.
        for side, contents in (("a", base), ("b", files)):
            write_files(Path(folder) / side, {str(n): contents[p] for n, p in enumerate(paths) if p in contents})
        return [_file_diff(folder, number, path, base, files) for number, path in enumerate(paths)]


def _file_diff(folder: str, number: int, path: str, base: Files, files: Files) -> FileDiff:
    before = f"a/{number}" if path in base else "/dev/null"
    after = f"b/{number}" if path in files else "/dev/null"
    options = ["--no-index", "--no-color", "--no-ext-diff", "--no-textconv", "-U0"]
    done = run_git(["diff", *options, "--", before, after], folder, good=(0, 1))
    lines = re.findall(r".*\n|.+", done.decode("utf-8", "replace"))
    start = next((at for at, line in enumerate(lines) if line.startswith("@@")), len(lines))
    hunks = []
    for match in filter(None, map(_HUNK.match, lines[start:])):
        first, count = int(match[1]), int(match[2]) if match[2] is not None else 1
        hunks.append((first, first + max(count, 1) - 1))
    return FileDiff(
        path=path,
        status="added" if path not in base else "deleted" if path not in files else "modified",
        hunks=tuple(hunks),
        added=sum(line.startswith("+") for line in lines[start:]),
        removed=sum(line.startswith("-") for line in lines[start:]),
        binary=start == len(lines) and bool(base.get(path) or files.get(path)),
        diff="".join(lines[start:]),
    )


def overlaps(diffs: Mapping[str, list[FileDiff]], files: Mapping[str, Files]) -> list[dict[str, Any]]:
    """For each pair of agents: the files that both changed, those of them with equal content, and the line ranges of
    the base that both changed."""
    pairs = []
    for agent, other in combinations(diffs, 2):
        mine = {each.path: each for each in diffs[agent]}
        theirs = {each.path: each for each in diffs[other]}
        both = sorted(mine.keys() & theirs.keys())
        lines = [
            {"path": path, "firstLine": max(a[0], b[0]), "lastLine": min(a[1], b[1])}
            for path in both
            if files[agent].get(path) != files[other].get(path)
            for a in mine[path].hunks
            for b in theirs[path].hunks
            if a[0] <= b[1] and b[0] <= a[1]
        ]
        identical = [path for path in both if files[agent].get(path) == files[other].get(path)]
        pairs.append({"agents": [agent, other], "files": both, "identicalFiles": identical, "overlappingHunks": lines})
    return pairs
