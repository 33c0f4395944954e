"""The folder of one host's sandboxes under the temporary folder, which lasts as long as its host.

Its name carries the host's pid, and the host holds a lock on it. A process id alone does not tell whether the host
runs: hosts in several PID namespaces can share /tmp, and one of them sees no process of another.
"""

import fcntl
import os
import re
import tempfile
from pathlib import Path

from headrace.vmhost.guest import walks

_NAME = re.compile(r"headrace-(\d+)-\w+")


class Scratch:
    """A new locked folder; folders of hosts that have ended are removed first."""

    def __init__(self) -> None:
        sweep()
        while True:
            self.path = tempfile.mkdtemp(prefix=f"headrace-{os.getpid()}-")
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # a sweep in another PID namespace has removed it already
                continue
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a sweep in another PID namespace came first and removes it
                os.close(self._lock)
                continue
            if os.path.isdir(self.path):
                return
            os.close(self._lock)

    def exists(self) -> bool:
        """Whether the folder is still there: a program that clears /tmp may have removed it."""
        return os.path.isdir(self.path)

    def remove(self) -> None:
        """Remove the folder with everything in it, and give the lock back."""
        walks.remove(self.path)
        os.close(self._lock)


def sweep() -> None:
    """Remove the folders of hosts that no longer run."""
    for folder in Path(tempfile.gettempdir()).glob("headrace-*-*"):
        owner = _NAME.fullmatch(folder.name)
        if not owner or os.path.exists(f"/proc/{owner[1]}"):
            continue
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # another sweep was first, or it is another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            walks.remove(str(folder))
        except BlockingIOError:  # its host runs in another PID namespace
            continue
        finally:
            os.close(lock)
