"""Finds the text that an edit quotes, by a fixed sequence of comparisons (rungs) from exact to loose.

The rungs are ``exact``; ``trailing space`` (lines without trailing white space); ``indentation`` (all lines shifted by
one amount, by which the replacement is shifted too); ``unicode`` (typographic quotes, dashes and spaces as their ASCII
forms). The first rung with a match decides: one match is the place, several are an ambiguity. No rung uses similarity
or a model, so a file and a call always give the same result.

Trade-off: after ``exact`` only whole lines match. Some edits fail that a looser rule would accept, but no edit changes
a wrong place.
"""

from collections.abc import Callable, Sequence
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


class Place(NamedTuple):
    """A match: offsets into the text, and the replacement as it is written there."""

    start: int
    end: int
    new: str


class Match(NamedTuple):
    """The places of the first rung that matched; empty if no rung did."""

    rung: Rung
    places: tuple[Place, ...]


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


def _exact(text: str, old: str, new: str) -> tuple[Place, ...]:
    places: list[Place] = []
    at = text.find(old)
    while at >= 0:
        places.append(Place(at, at + len(old), new))
        at = text.find(old, at + len(old))
    return tuple(places)


def _by_lines(
    text: str, old: str, new: str, indent_of: Callable[[Sequence[str], Sequence[str]], str | None]
) -> tuple[Place, ...]:
    """Windows of whole lines for which `indent_of(window, quoted)` returns the replacement's indent, not None."""
    quoted = old.strip("\n").split("\n")
    if not any(line.strip() for line in quoted):
        return ()
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    places: list[Place] = []
    at = 0
    while at + len(quoted) <= len(lines):
        indent = indent_of(lines[at : at + len(quoted)], quoted)
        if indent is None:
            at += 1
            continue
        end = starts[at + len(quoted)] - 1
        places.append(Place(starts[at], end, _indented(new.strip("\n"), indent)))
        at += len(quoted)
    return tuple(places)


def _trailing(window: Sequence[str], quoted: Sequence[str]) -> str | None:
    same = all(a.rstrip() == b.rstrip() for a, b in zip(window, quoted, strict=True))
    return "" if same else None


def _unicode(window: Sequence[str], quoted: Sequence[str]) -> str | None:
    same = all(_plain(a) == _plain(b) for a, b in zip(window, quoted, strict=True))
    return "" if same else None


def _plain(line: str) -> str:
    return line.translate(_TYPOGRAPHIC).rstrip()


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


def _indented(new: str, indent: str) -> str:
    if not indent:
        return new
    if indent.startswith("-"):
        columns = int(indent[1:])
        return "\n".join(line[min(columns, len(_indent(line))) :] for line in new.split("\n"))
    return "\n".join(indent + line if line.strip() else line for line in new.split("\n"))
