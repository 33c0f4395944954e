"""Finds the text that an edit quotes, by a fixed sequence of comparisons (rungs) from exact to loose.

Both texts are as read_file shows a file: lines joined by ``\\n``, whatever the file's line ends are.

The rungs are ``exact``; ``trailing space`` (lines without trailing white space); ``indentation`` (all lines shifted by
one amount, by which the replacement is shifted too); ``unicode`` (typographic quotes, dashes and spaces as their ASCII
forms). The first rung with a match decides: one match is the place, several are an ambiguity. No rung uses similarity
or a model, so a file and a call always give the same result.

Only what differs between the quote and the replacement is replaced: a quoted line that the replacement repeats stays as
the file has it, and so does the white space at the end of a line unless the call changes it.

Trade-off: after ``exact`` only whole lines match. Some edits fail that a looser rule would accept, but no edit changes
a wrong place.
"""

from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

Rung = Literal["exact", "trailing space", "indentation", "unicode", "anchor"]
"""``anchor``: the call named lines by their hashes, and nothing was compared."""

_TYPOGRAPHIC = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2010": "-",
        "\u2011": "-",
        "\u2012": "-",
        "\u2013": "-",
        "\u2014": "-",
        "\u2212": "-",
        "\u00a0": " ",
        "\u2007": " ",
        "\u202f": " ",
        "\u2026": "...",
    }
)


class Change(NamedTuple):
    """Offsets into the text, and what takes the place of the text between them."""

    start: int
    end: int
    new: str


class MatchedPlace(NamedTuple):
    """A match: its offsets in the text, and the changes inside it, in order and without overlap."""

    start: int
    end: int
    changes: tuple[Change, ...]


class Match(NamedTuple):
    """The places of the first rung that matched; empty if no rung did."""

    rung: Rung
    places: tuple[MatchedPlace, ...]


def find(text: str, old: str, new: str) -> Match:
    """The places of `old` in `text`. Places of one match never overlap."""
    exact = _exact(text, old, new)
    if exact:
        return Match("exact", exact)
    rungs: tuple[tuple[Rung, Callable[[Sequence[str], Sequence[str]], str | None]], ...] = (
        ("trailing space", _trailing),
        ("indentation", _shifted),
        ("unicode", _unicode),
    )
    for rung, indent_of in rungs:
        places = _by_lines(text, old, new, indent_of)
        if places:
            return Match(rung, places)
    return Match("exact", ())


def _exact(text: str, old: str, new: str) -> tuple[MatchedPlace, ...]:
    places: list[MatchedPlace] = []
    before = _same(old, new)
    behind = _same(old[before:][::-1], new[before:][::-1])
    at = text.find(old)
    while at >= 0:
        end = at + len(old)
        change = Change(at + before, end - behind, new[before : len(new) - behind])
        places.append(MatchedPlace(at, end, (change,)))
        at = text.find(old, end)
    return tuple(places)


def _same(first: str, second: str) -> int:
    """Characters of the common start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _by_lines(
    text: str, old: str, new: str, indent_of: Callable[[Sequence[str], Sequence[str]], str | None]
) -> tuple[MatchedPlace, ...]:
    """Windows of whole lines for which `indent_of(window, quoted)` returns the replacement's indent, not None."""
    quoted = old.strip("\n").split("\n")
    if not any(line.strip() for line in quoted):
        return ()
    new_lines = new.strip("\n").split("\n") if new.strip("\n") or not old.endswith("\n") else []
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    places: list[MatchedPlace] = []
    at = 0
    while at + len(quoted) <= len(lines):
        window = lines[at : at + len(quoted)]
        indent = indent_of(window, quoted)
        if indent is None:
            at += 1
            continue
        changes = tuple(_changes(window, quoted, new_lines, indent, starts[at : at + len(quoted) + 1], len(text)))
        places.append(MatchedPlace(starts[at], starts[at + len(quoted)] - 1, changes))
        at += len(quoted)
    return tuple(places)


def _changes(
    window: Sequence[str], quoted: Sequence[str], new: Sequence[str], indent: str, starts: Sequence[int], size: int
) -> Iterator[Change]:
    """The differences between the quoted lines and the new ones as changes of the window. starts: offsets of its lines
    and of the line behind it; size: characters of the text."""
    for kind, a, b, c, d in SequenceMatcher(None, quoted, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        lines = [_indented(line, indent) for line in new[c:d]]
        if kind == "replace":
            for place, (have, said) in enumerate(zip(window[a:b], quoted[a:b], strict=True)):
                if place < len(lines) and _tail(said) == _tail(lines[place]):
                    lines[place] = lines[place].rstrip() + _tail(have)
        if a < b and lines:
            yield Change(starts[a], starts[b] - 1, "\n".join(lines))
        elif lines and a < len(quoted):
            yield Change(starts[a], starts[a], "".join(f"{line}\n" for line in lines))
        elif lines:
            yield Change(starts[a] - 1, starts[a] - 1, "".join(f"\n{line}" for line in lines))
        elif starts[b] <= size:
            yield Change(starts[a], starts[b], "")
        else:  # the last lines of a text that does not end with a line end
            yield Change(max(0, starts[a] - 1), size, "")


def _trailing(window: Sequence[str], quoted: Sequence[str]) -> str | None:
    same = all(a.rstrip() == b.rstrip() for a, b in zip(window, quoted, strict=True))
    return "" if same else None


def _plain(line: str) -> str:
    return line.translate(_TYPOGRAPHIC).rstrip()


def _unicode(window: Sequence[str], quoted: Sequence[str]) -> str | None:
    same = all(_plain(a) == _plain(b) for a, b in zip(window, quoted, strict=True))
    return "" if same else None


def _shifted(window: Sequence[str], quoted: Sequence[str]) -> str | None:
    """The indent that all quoted lines lack, or ``-n`` if they have n columns too many; None if the shift differs."""
    shift: str | None = None
    for have, said in zip(window, quoted, strict=True):
        if have.strip() != said.strip():
            return None
        if not have.strip():
            continue
        file_indent, quoted_indent = _indent(have), _indent(said)
        if file_indent.endswith(quoted_indent):
            step = file_indent.removesuffix(quoted_indent)
        elif quoted_indent.endswith(file_indent):
            step = f"-{len(quoted_indent) - len(file_indent)}"
        else:
            return None
        if shift not in (None, step):
            return None
        shift = step
    return shift


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _tail(line: str) -> str:
    return line[len(line.rstrip()) :]


def _indented(line: str, indent: str) -> str:
    """The line behind the indent, or without the columns that ``-n`` names."""
    if indent.startswith("-"):
        return line[min(int(indent[1:]), len(_indent(line))) :]
    return indent + line if line.strip() else line
