"""Copies of full snapshots to the folder that all nodes share, and the removal of copies that nobody finishes.

A copy has a hidden name of its own until it is complete and verified. Its sender locks it (flock), so the copy of a
sender that was killed is one without a lock. The name says under which kernel it is written, because every file system
has these locks within one kernel and some have none between machines. So another machine's copy is also left alone for
`ABANDONED_S` after its last byte. This assumes that a copy's verification takes less than that, or that the file system
has such locks between machines (NFS has them), and that the clocks of the machines differ by less.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headrace.weights import snapshot
from headrace.weights.state import WeightError

ABANDONED_S = 6 * 3600.0
"""Seconds since the last write after which another machine's copy without a lock is taken for one of a dead sender."""


def share(source: Path, path: Path, state_hash: str) -> None:
    """Copy a file to the shared folder under its name there, at once and durably. WeightError when the copy has another
    state; then it has no name. OSError when the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _part(path) as (part, file):
        shutil.copyfile(source, part)
        if (copied := snapshot.file_hash(part)) != state_hash:
            raise WeightError(f"the copy {part} has state {copied}, expected {state_hash}")
        os.fsync(file.fileno())
        os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _part(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new locked file beside `path`, which is removed at the end if it still has its first name."""
    while True:
        part = path.with_name(f".{path.name}.{_kernel()}-{secrets.token_hex(4)}.part")
        with open(part, "xb") as file:
            try:
                with suppress(OSError):  # a file system without locks: others go by the time of the last write
                    fcntl.flock(file, fcntl.LOCK_EX)
                if part.exists():  # nobody took it for abandoned before it was locked
                    yield part, file
                    return
            finally:
                part.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove the copies of senders that have ended from a run's folder; their paths. OSError."""
    return [part for part in sorted(folder.glob(".*.part")) if _abandoned(part)]


def _abandoned(part: Path) -> bool:
    """Remove a copy if its sender has ended. Whether it was removed."""
    try:
        descriptor = os.open(part, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        here = part.name.rpartition(".")[0].rpartition(".")[2].startswith(f"{_kernel()}-")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            here = False  # no locks here
        if not here and time.time() - os.fstat(descriptor).st_mtime < ABANDONED_S:
            return False
        part.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _kernel() -> str:
    """A name of the running kernel: another one after a restart, and on every machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")[:16]
