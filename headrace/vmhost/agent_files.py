"""The slot agent's source files, which guest images, the process backend and cold test runs contain.

The host reads them here, so that the package itself imports nothing that a guest would have to load.
"""

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "guest"


def sources() -> dict[str, bytes]:
    """The agent's files by their paths in its package, in the order of those paths."""
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in sorted(FOLDER.rglob("*.py"))}


@cache
def digest(beside: str = "") -> str:
    """Content address of the agent and of what it runs with: an interpreter, or an image's digest."""
    content = hashlib.sha256(beside.encode())
    for path, source in sources().items():
        content.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(source).digest())
    return content.hexdigest()[:32]


def folders() -> list[str]:
    """The folders inside the agent's package."""
    return sorted({path.relative_to(FOLDER).parent.as_posix() for path in FOLDER.rglob("*.py")} - {"."})
