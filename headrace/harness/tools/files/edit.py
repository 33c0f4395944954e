"""edit: replace a quoted text that occurs exactly once in the file.

Most base models know search-and-replace edits. An inexact quote is matched by a fixed sequence of looser comparisons
(files/matching.py); the answer, and so the trajectory, names the comparison that matched. An ambiguous quote changes
nothing, and the answer names every candidate, because choosing one would be a guess. The policy must read a file again
that changed since it last saw it.
"""

import difflib

from headrace.harness.tools.base import PATH, Answer, Parameter, ToolSchema, Workspace, failed
from headrace.harness.tools.files.matching import Place, find
from headrace.harness.tools.files.staleness import forget, remember, stale
from headrace.messages.sandbox import ReadFile, WriteFiles

_NAMED = 20
"""Most candidates of an ambiguous quote that are shown with their line; the others are only counted."""


class EditTool:
    """Replaces a quoted text."""

    schema = ToolSchema(
        "edit",
        "replace a text that stands exactly once in a file by another; quote enough lines to make it unique",
        (
            PATH,
            Parameter("old", "the text to replace, exactly as it stands in the file"),
            Parameter("replace_all", "true replaces every occurrence", required=False),
        ),
        Parameter("new", "the text to put in its place"),
    )
    writes = True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, the comparison that matched unless it is ``exact``, and the number of replacements for replace_all;
        or the reason why nothing was changed."""
        path, old, new = arguments["path"], arguments["old"], arguments["new"]
        every = arguments.get("replace_all", "false").strip().lower()
        if every not in ("true", "false"):
            return Answer(f"replace_all: expected true or false, got {every!r}", ok=False)
        if not old.strip():
            return Answer("old is empty; quote the text to replace, or use write_file for a new file", ok=False)
        if old == new:
            return Answer("old and new are the same text", ok=False)
        read = await workspace.call(ReadFile(path=path))
        if not read.ok:
            return failed(read)
        if stale(workspace, path, read.data):
            forget(workspace, path)
            return Answer(f"{path} has changed since it was last read; read it again", ok=False)
        text = read.data.decode("utf-8", "surrogateescape")
        windows = "\r\n" in text and "\n" not in text.replace("\r\n", "")
        text, old, new = (part.replace("\r\n", "\n") for part in (text, old, new)) if windows else (text, old, new)
        match = find(text, old, new)
        if not match.places:
            return Answer(f"{path}: the text was not found{_nearest(text, old)}", ok=False)
        if len(match.places) > 1 and every == "false":
            return Answer(f"{path}: the text stands at {_candidates(text, match.places)}; quote more lines", ok=False)
        changed = _replace(text, match.places)
        data = (changed.replace("\n", "\r\n") if windows else changed).encode("utf-8", "surrogateescape")
        written = await workspace.call(WriteFiles(files={path: data}))
        if not written.ok:
            return failed(written)
        remember(workspace, path, data)
        how = [f"matched by {match.rung}"] if match.rung != "exact" else []
        how += [f"{len(match.places)} replacements"] if every == "true" else []
        return Answer(", ".join(["ok", *how]))


def _replace(text: str, places: tuple[Place, ...]) -> str:
    for place in reversed(places):
        text = text[: place.start] + place.new + text[place.end :]
    return text


def _candidates(text: str, places: tuple[Place, ...]) -> str:
    numbers = [text.count("\n", 0, place.start) + 1 for place in places]
    lines = text.split("\n")
    shown = "".join(f"\n{number}:{lines[number - 1]}" for number in numbers[:_NAMED])
    more = f"\nand {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{len(numbers)} places (lines {', '.join(map(str, numbers))}){shown}{more}\n"


def _nearest(text: str, old: str) -> str:
    """A hint with the line that is most similar to the first quoted line; no edit uses similarity."""
    first = next(line.strip() for line in old.split("\n") if line.strip())
    lines = {line.strip(): number for number, line in reversed(list(enumerate(text.split("\n"), 1))) if line.strip()}
    close = difflib.get_close_matches(first, list(lines), n=1, cutoff=0.8)
    return f"; line {lines[close[0]]} is the most similar one: {close[0]}" if close else ""


TOOL = EditTool()
