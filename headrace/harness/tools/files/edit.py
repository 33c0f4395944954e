"""edit: replace a quoted text that occurs exactly once in the file, or lines that are named by their anchors.

Most base models know search-and-replace edits. An inexact quote is matched by a fixed sequence of looser comparisons
(files/matching.py); the answer, and so the trajectory, names the comparison that matched. An ambiguous quote changes
nothing, and the answer names every candidate, because choosing one would be a guess. An anchor is a line's number and
the hash of its text (files/anchors.py); a line without that hash is not replaced. The policy must read a file again
that changed since it last saw it. Bytes outside of what changes stay, and new lines take the file's line ends
(vmhost/guest/lines.py).
"""

import difflib
from collections.abc import Sequence

from headrace.harness.tools.base import PATH, Answer, Parameter, ToolSchema, Workspace, failed, true_or_false
from headrace.harness.tools.files.anchors import resolve
from headrace.harness.tools.files.matching import MatchedPlace
from headrace.harness.tools.files.shown import ShownFile
from headrace.harness.tools.files.staleness import LARGEST, forget, remember, stale
from headrace.messages.sandbox import ReadFile, WriteFiles
from headrace.vmhost.guest.lines import parse, replaced, shown_line, split

_NAMED = 20
"""Most candidates of an ambiguous quote that are shown with their line; the others are only counted."""
_NO_TEXT = (
    "the edit would write anew what read_file shows as an escape and edit cannot write; leave it out of what changes, "
    "or use the terminal"
)


class EditTool:
    """Replaces a quoted text, or lines."""

    schema = ToolSchema(
        "edit",
        "replace a text that stands exactly once in a file by another; quote enough lines to make it unique; or "
        "replace lines by the anchors that read_file shows",
        (
            PATH,
            Parameter("old", "the text to replace, exactly as it stands in the file", required=False),
            Parameter("at", "instead of old: anchors of the lines to replace: 12#a3f0-15#09bc", required=False),
            Parameter("replace_all", "true replaces every occurrence", required=False),
        ),
        Parameter("new", "the text to put in its place"),
    )
    writes = True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, the comparison that matched unless it is ``exact``, and the number of replacements for replace_all;
        or the reason why nothing was changed."""
        path, old, new, at = arguments["path"], arguments.get("old", ""), arguments["new"], arguments.get("at", "")
        every = true_or_false(arguments, "replace_all")
        if isinstance(every, Answer):
            return every
        if at and (old or every):
            return Answer("give either old or at; replace_all needs old", ok=False)
        if not at and not old.strip():
            return Answer("old is empty; quote the text to replace, or use write_file for a new file", ok=False)
        if not at and old == new:
            return Answer("old and new are the same text", ok=False)
        read = await workspace.call(ReadFile(path=path, limit=LARGEST))
        if not read.ok:
            return failed(read)
        if read.truncated:
            return Answer(f"{path} has more than {LARGEST >> 20} MiB, too much for edit; use the terminal", ok=False)
        if stale(workspace, path, read.data):
            forget(workspace, path)
            return Answer(f"{path} has changed since it was last read; read it again", ok=False)
        if at:
            lines = resolve(parse(read.data).lines, at)
            if isinstance(lines, str):
                return Answer(f"{path}: {lines}", ok=False)
            return await _write(workspace, path, replaced(read.data, *lines, new), ["ok"])
        file, old, new = ShownFile(read.data), "".join(map(shown_line, split(old))), new.replace("\r\n", "\n")
        if old == new:
            return Answer("old and new are the same text but for line ends, which edit keeps", ok=False)
        match = file.find(old, new)
        if not match.places:
            return Answer(f"{path}: the text was not found{_nearest(file.text, old)}", ok=False)
        if len(match.places) > 1 and not every:
            places = _candidates(file.text, match.places)
            return Answer(f"{path}: the text stands at {places}; quote more lines", ok=False)
        data = file.changed([change for place in match.places for change in place.changes])
        if data is None:
            return Answer(f"{path}: {_NO_TEXT}", ok=False)
        how = [f"matched by {match.rung}"] if match.rung != "exact" else []
        how += [f"{len(match.places)} replacements"] if every else []
        return await _write(workspace, path, data, ["ok", *how])


async def _write(workspace: Workspace, path: str, data: bytes, how: Sequence[str]) -> Answer:
    written = await workspace.call(WriteFiles(files={path: data}))
    if not written.ok:
        return failed(written)
    remember(workspace, path, data)
    return Answer(", ".join(how))


def _candidates(text: str, places: tuple[MatchedPlace, ...]) -> str:
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
