"""Anchors of lines: a line's number and a hash of its text, such as ``12#a3f0``, by which `edit` names lines.

read_file shows them on request. An edit by anchors applies only where every named line still has its hash, so an edit
cannot change lines that are not the ones the policy read.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b

from headrace.vmhost.guest.lines import body, shown

_RANGE = re.compile(r"(\d{1,7})#([0-9a-f]{4})(?:-(\d{1,7})#([0-9a-f]{4}))?")
_NAMED = 5
"""Most lines with an anchor's hash that a refusal names."""


def line_hash(line: str) -> str:
    """Four hexadecimal digits of a line without its line end."""
    return blake2b(body(line).encode("utf-8", "surrogatepass"), digest_size=2).hexdigest()


def anchored(lines: Sequence[str], first: int = 1) -> str:
    """Lines of a file as ``number#hash:text``."""
    return "\n".join(f"{number}#{line_hash(line)}:{shown(line)}" for number, line in enumerate(lines, first))


def resolve(lines: Sequence[str], at: str) -> tuple[int, int] | str:
    """First and last line of an anchor or a range of two, 1-based; or the reason why the file does not have them."""
    match = _RANGE.fullmatch(at.strip())
    if match is None:
        return f"at: expected an anchor such as 12#a3f0 or two such as 12#a3f0-15#09bc, got {at.strip()[:60]!r}"
    ends = [(int(match[1]), match[2]), (int(match[3] or match[1]), match[4] or match[2])]
    for number, digest in ends:
        if not 1 <= number <= len(lines):
            return f"there is no line {number}; the file has {len(lines)}"
        if line_hash(lines[number - 1]) != digest:
            same = [str(other) for other, line in enumerate(lines, 1) if line_hash(line) == digest]
            now = f"; {'lines' if len(same) > 1 else 'line'} {', '.join(same[:_NAMED])} now" if same else ""
            return f"line {number} does not have the hash {digest}{now}; read the file again"
    (first, _), (last, _) = ends
    return (first, last) if first <= last else f"line {last} comes before line {first}"
