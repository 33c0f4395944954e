"""Whether a file is still as the policy last saw it: hashes of read and written files in the episode's memory.

An edit by quoted text into a file that a shell command or a user changed meanwhile may hit a place that the policy
never saw. A file of unknown state (never read, or the episode was resumed by another actor) is not checked: then the
quoted text alone has to match.
"""

from hashlib import blake2b

from headrace.harness.tools.base import Workspace


def _key(path: str) -> str:
    return f"file:{path.removeprefix('./')}"


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def remember(workspace: Workspace, path: str, data: bytes) -> None:
    """The policy has seen, or written, this content."""
    workspace.memory[_key(path)] = _hash(data)


def forget(workspace: Workspace, path: str) -> None:
    """The content is not known any more."""
    workspace.memory.pop(_key(path), None)


def stale(workspace: Workspace, path: str, data: bytes) -> bool:
    """Whether the file differs from what the policy last saw of it."""
    seen = workspace.memory.get(_key(path))
    return seen is not None and seen != _hash(data)
