"""Counts the lines that an agent added and that still exist later.

A line is identified by a digest of its text without indentation, so the gateway stores no source code. Lines without a
letter or digit do not count, because any author may write the same bracket.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

MOST_LINES = 20_000
"""The most added lines of a run that are counted; further lines are ignored."""


def added_lines(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> tuple[str, ...]:
    """Digests of the lines that files have after a run and not before, each as often as it was added.

    before, after: path to content. A file that is not text adds no line."""
    added: list[str] = []
    for path in sorted(after):
        if after[path] != before.get(path):
            new = Counter(_lines(after[path])) - Counter(_lines(before.get(path, b"")))
            added += new.elements()
    return tuple(added[:MOST_LINES])


def kept_lines(added: Iterable[str], texts: Iterable[str]) -> int:
    """Number of added lines that the texts still have; a line may have moved to another file."""
    present = Counter(line for text in texts for line in _lines(text.encode(errors="surrogatepass")))
    return (Counter(added) & present).total()


def _lines(content: bytes) -> list[str]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return []
    stripped = (line.strip() for line in text.splitlines())
    return [hashlib.sha256(line.encode()).hexdigest()[:12] for line in stripped if any(map(str.isalnum, line))]
