"""The SGLang releases whose interface is known here. Nothing is refused by these numbers once a server answers.

deploy/sglang/versions.json has the table behind them.
"""

MEASURED = ("0.5.23",)
"""The tests of the real server ran with these releases."""
VERIFIED = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""The source of these releases has everything in `capabilities.REQUIRED`."""
OLDER = (
    ("0.5.18", "weight_versions in a reply, which name the version of each token"),
    ("0.5.17", "cache_salt, which keeps prefixes of different weights apart"),
)
"""The newest release that lacks a capability, and the capability."""


def lacks(release: str) -> str:
    """The first known capability that a release lacks; empty when none is known, also for an unknown release."""
    number = _number(release)
    return next((what for last, what in reversed(OLDER) if number and number < _next(last)), "")


def said(release: str) -> str:
    """Text on what is known about a release, for logs and checks."""
    if release in MEASURED:
        return f"SGLang {release}"
    if release in VERIFIED:
        return f"SGLang {release}: its source has the interface, and it was not run (measured: {', '.join(MEASURED)})"
    return f"SGLang {release}, which was neither run nor read (read: {VERIFIED[0]} to {VERIFIED[-1]})"


def _number(release: str) -> tuple[int, ...]:
    """The numbers of a release such as 0.5.15.post1, without its suffix; empty when it has none."""
    words = release.split(".")[:3]
    return tuple(int(word) for word in words) if len(words) == 3 and all(word.isdigit() for word in words) else ()


def _next(release: str) -> tuple[int, ...]:
    *major, patch = _number(release)
    return (*major, patch + 1)
