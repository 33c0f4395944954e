"""The state of a host: its lock, whether a keeper holds it, and the report about keeper and processes.

`host start` takes the lock and hands it to the keeper that it starts, so at no moment a host has two.
"""

import fcntl
import os
from pathlib import Path
from typing import Literal

import msgspec

LOCK, STATE, LOGS, LOG = "node.lock", "node.state.json", "logs", "keeper.log"


class Part(msgspec.Struct, kw_only=True):
    """One process as its keeper sees it."""

    name: str
    pid: int = 0
    restarts: int = 0
    cause: str = ""
    """The cause of its last restart."""


class State(msgspec.Struct, kw_only=True):
    """A host's report about its keeper and processes."""

    pid: int = 0
    state: Literal["starting", "running", "stopping", "stopped", "failed", "none"] = "none"
    error: str = ""
    files: str = ""
    """sha256 of the files that the launcher sent."""
    processes: list[Part] = []


def write_state(folder: Path, state: State) -> None:
    """Write the host's state to another file and rename it, so that a reader never sees half of it."""
    scratch = folder / f".{STATE}"
    scratch.write_bytes(msgspec.json.encode(state))
    scratch.replace(folder / STATE)


def read_state(folder: Path) -> State:
    """The host's state. A keeper that ended without writing it is reported as failed."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    if state.state in ("starting", "running", "stopping") and not held(folder):
        state.state = "failed"
        state.error = "its keeper ended without writing a cause: it was killed, or the host restarted"
    return state


def held(folder: Path) -> bool:
    """Whether a keeper holds the lock."""
    with (folder / LOCK).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def lock_of(folder: Path) -> int:
    """Take the lock; its file descriptor, which a child may inherit, or -1 when another process holds it."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return -1
    return handle
