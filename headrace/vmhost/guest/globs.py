"""Glob patterns over workspace paths, without regular expressions: compiling one costs tens of CPU-ms under emulation.

``*`` and ``?`` stay inside one path segment, ``**`` spans any number of them. A pattern without a slash matches the
file's name at any depth unless `anchored` is asked for.
"""

from collections.abc import Iterable


def segment(pattern: str, text: str) -> bool:
    """Whether one path segment matches: the greedy two-pointer algorithm, linear in practice."""
    p = t = mark = 0
    star = -1
    while t < len(text):
        if p < len(pattern) and pattern[p] == "*":
            star, mark, p = p, t, p + 1
        elif p < len(pattern) and pattern[p] in ("?", text[t]):
            p, t = p + 1, t + 1
        elif star >= 0:
            mark += 1
            p, t = star + 1, mark
        else:
            return False
    return pattern[p:].strip("*") == ""


def _walk(pattern: list[str], path: list[str]) -> bool:
    for index, part in enumerate(pattern):
        if part == "**":
            rest = pattern[index + 1 :]
            return not rest or any(_walk(rest, path[start:]) for start in range(index, len(path)))
        if index >= len(path) or not segment(part, path[index]):
            return False
    return len(path) == len(pattern)


def allowed(patterns: Iterable[str], path: str) -> bool:
    """Whether a task allows changes of a path. Only a pattern that begins with a slash matches paths outside of the
    workspace, which are absolute."""
    if ".." in path.split("/"):
        return False
    outside = path.startswith("/")
    return any(matches(pattern, path, True) for pattern in patterns if pattern.startswith("/") == outside)


def matches(pattern: str, path: str, anchored: bool = False) -> bool:
    """Whether a relative path with forward slashes matches."""
    if pattern in ("**", "**/*"):
        return True
    if "/" not in pattern and not anchored:
        return segment(pattern, path.rpartition("/")[2])
    if "*" not in pattern and "?" not in pattern:
        return pattern == path
    return _walk(pattern.split("/"), path.split("/"))
