"""Paths below a folder, made of names that arrive from outside: in messages, HTTP bodies, archives and files.

A name is checked as text before anything touches the disk. A link that an operator puts into the folder is followed.
"""

import re
from pathlib import Path

LONGEST = 4096
_PART = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]{1,255}")


def is_inner(name: str) -> bool:
    """Whether a name leads to a place below the folder that it is joined to: relative, without empty parts, ``.``,
    ``..``, backslashes, control characters and half surrogates."""
    parts = name.split("/")
    return len(name) <= LONGEST and all(_PART.fullmatch(part) and part not in (".", "..") for part in parts)


def inner(root: Path, name: str) -> Path:
    """`root` / `name`. ValueError when that is not below `root`."""
    if not is_inner(name):
        raise ValueError(f"expected a relative path without '..', got {name!a:.200}")
    return root / name


def own_file(root: Path, path: str, ending: str) -> Path:
    """The file that a message names by its path on this machine, where it is a regular file below `root` once links are
    followed, and its name has this ending. ValueError for any other path; FileNotFoundError when it is gone."""
    wrong = f"expected a file {ending} below {root}, got {path!a:.200}"
    try:
        file = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, NUL, half a surrogate
        raise ValueError(wrong) from None
    if not file.is_relative_to(root.resolve()) or not file.name.endswith(ending) or not path.endswith(ending):
        raise ValueError(wrong)
    if not file.is_file():
        raise ValueError(wrong) if file.exists() else FileNotFoundError(path)
    return file
