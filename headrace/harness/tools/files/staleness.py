"""Detects files that changed since the policy last saw them, by hashes in the episode's memory.

An edit by quoted text in a file that a shell command or a user changed may change a place that the policy never saw. A
file without a hash is not checked: the policy never read it, or another actor resumed the episode. Then only the
quoted text must match.
"""

from hashlib import blake2b

from headrace.harness.tools.base import Workspace

LARGEST = 16 << 20
"""Bytes of the largest file that is read and edited as a whole."""


def _key(path: str) -> str:
    return f"file:{path.removeprefix('./')}"


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def remember(workspace: Workspace, path: str, data: bytes) -> None:
    """Store the hash of content that the policy has read or written."""
    workspace.memory[_key(path)] = _hash(data)


def forget(workspace: Workspace, path: str) -> None:
    """Remove the hash of a file whose content is no longer known."""
    workspace.memory.pop(_key(path), None)


def stale(workspace: Workspace, path: str, data: bytes) -> bool:
    """Whether the file differs from the content that the policy last saw."""
    seen = workspace.memory.get(_key(path))
    return seen is not None and seen != _hash(data)
