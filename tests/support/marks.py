"""Processes by a mark in their environment, which their children inherit."""

from pathlib import Path


def marked(mark: str) -> dict[int, str]:
    """The processes that inherited a mark `NAME=value`, and their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found
