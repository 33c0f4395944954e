"""The result type of a check."""

import msgspec

Roles = frozenset[str]
"""Kinds of the actors that a machine runs; none stand for all."""


def wanted(roles: Roles, *kinds: str) -> bool:
    """Whether a machine with these roles runs an actor of one of the kinds."""
    return not roles or bool(roles & set(kinds))


class Finding(msgspec.Struct, frozen=True):
    """One sentence about one part. `good` is False for a problem that prevents the run from working; the text then
    says what to do."""

    part: str
    """Configuration section or resource."""
    good: bool
    text: str


def good(part: str, text: str) -> Finding:
    """The part is fine."""
    return Finding(part, True, text)


def bad(part: str, text: str) -> Finding:
    """The part has a problem. text: what is wrong, what was expected, what to do."""
    return Finding(part, False, text)


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / (1 << 30):.2f} GiB"
