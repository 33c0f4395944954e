"""Three-way merge of an agent's work into a codebase that changed meanwhile, file by file, with a list of conflicts.

A file that only one side changed is taken from that side. `git merge-file` merges a file that both sides changed. A
conflict loses nothing: conflicting hunks stay in the file between markers, with the base; if one side deleted a file
that the other changed, the changed file stays; if both changed a binary file, the codebase's file stays and the agent's
is added under another name. Each conflict names its file, and its hunk where there is one.
"""

import asyncio
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.gateway.agents.comparing import Files, changed_paths
from headrace.gateway.agents.git_files import run_git, write_files

LEAST_MARKER = 7
_RUNS = re.compile(rb"^(<+|=+|>+|\|+)", re.MULTILINE)


class Merged(NamedTuple):
    """The result of a merge."""

    changed: dict[str, bytes]
    """Files that differ from the codebase."""
    deleted: tuple[str, ...]
    conflicts: tuple[dict[str, Any], ...]


async def merge(base: Files, codebase: Files, agent: Files, name: str) -> Merged:
    """Merge the changes from `base` to `agent` into `codebase`. name: the agent's name in the markers. AgentRefused."""
    return await asyncio.to_thread(_merge, base, codebase, agent, name)


def _merge(base: Files, codebase: Files, agent: Files, name: str) -> Merged:
    merged: dict[str, bytes] = {}
    deleted: list[str] = []
    conflicts: list[dict[str, Any]] = []
    for path in changed_paths(base, agent):
        before, ours, theirs = base.get(path), codebase.get(path), agent.get(path)
        if ours == theirs:
            continue  # both made the same change
        if ours == before:
            if theirs is None:
                deleted.append(path)
            else:
                merged[path] = theirs
        elif ours is None or theirs is None:
            if theirs is not None:
                merged[path] = theirs
            by = "the codebase" if ours is None else f"agent {name}"
            text = f"deleted by {by}, changed by the other side: the changed file stays"
            conflicts.append({"path": path, "kind": "delete_modify", "detail": text})
        elif any(b"\0" in content for content in (before or b"", ours, theirs)):
            beside = _beside(path, name, codebase.keys() | agent.keys() | merged.keys())
            merged[beside] = theirs
            text = f"both changed a binary file: the codebase's stays, the agent's is {beside}"
            conflicts.append({"path": path, "kind": "binary", "detail": text, "other": beside})
        else:
            content, hunks = _merge_text(path, before or b"", ours, theirs, name)
            conflicts += hunks
            if content != ours:
                merged[path] = content
    conflicts += _folders(codebase, merged, deleted)
    return Merged(merged, tuple(deleted), tuple(conflicts))


def _merge_text(path: str, before: bytes, ours: bytes, theirs: bytes, name: str) -> tuple[bytes, list[dict[str, Any]]]:
    # Markers are longer than any similar sequence in the files, so each marker in the result comes from this merge.
    longest = max((len(run) for text in (before, ours, theirs) for run in _RUNS.findall(text)), default=0)
    size = max(LEAST_MARKER, longest + 1)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder) / "m", {"ours": ours, "base": before, "theirs": theirs})
        labels = ["-L", "codebase", "-L", "base", "-L", f"agent {name}"]
        argv = ["merge-file", "-p", "--diff3", f"--marker-size={size}", *labels, "ours", "base", "theirs"]
        content = run_git(argv, f"{folder}/m", good=range(128))
    return content, _conflicts(path, content, size)


def _conflicts(path: str, content: bytes, size: int) -> list[dict[str, Any]]:
    """The conflicting hunks of a merged file. size: characters of a marker. Lines are counted from 1."""
    marks = {char * size: part for char, part in ((b"<", "ours"), (b"|", "base"), (b"=", "theirs"), (b">", ""))}
    hunks: list[dict[str, Any]] = []
    part, parts, first = "", {"ours": b"", "base": b"", "theirs": b""}, 0
    for number, text in enumerate(content.split(b"\n"), 1):
        line = text + b"\n"
        mark = marks.get(line[:size]) if line[size : size + 1] in (b" ", b"\n", b"\r") else None
        if mark is None:
            if part:
                parts[part] += line
            continue
        if mark == "ours":
            first, parts = number, dict.fromkeys(parts, b"")
        part = mark
        if not mark:
            texts = {side: lines.decode("utf-8", "replace") for side, lines in parts.items()}
            hunk = {"path": path, "kind": "hunk", "hunk": len(hunks) + 1, "firstLine": first, "lastLine": number}
            hunks.append(hunk | {"codebase": texts["ours"], "base": texts["base"], "agent": texts["theirs"]})
    return hunks


def _beside(path: str, name: str, taken: Any) -> str:
    """An unused path in the folder of `path`."""
    number, beside = 0, f"{path}.agent-{name}"
    while beside in taken:
        number += 1
        beside = f"{path}.agent-{name}-{number}"
    return beside


def _folders(codebase: Mapping[str, bytes], merged: Mapping[str, bytes], deleted: list[str]) -> list[dict[str, Any]]:
    """Conflicts where a path is a file on one side and a folder on the other, so that both cannot be written."""
    files = (codebase.keys() - set(deleted)) | merged.keys()
    conflicts = []
    for path in sorted(files):
        parents = path.split("/")
        above = next((p for p in ("/".join(parents[:n]) for n in range(1, len(parents))) if p in files), None)
        if above is not None and (path in merged or above in merged):
            text = f"{above} is a file on one side and a folder on the other: move one of them"
            conflicts.append({"path": path, "kind": "file_folder", "detail": text, "other": above})
    return conflicts
