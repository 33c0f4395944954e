"""The log files of ranks: beside those of the actors, one for each rank, `trainer-rank-1.log`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

STARTED = '"event":"rank_started"'
"""In the first line of each life."""
FOLDER = "HEADRACE_LOGS"
"""Variable with the folder of this process's own log, set by `headrace up` and `launch` (launch/supervision/
children.py)."""
LOG_BYTES = 64 << 20
"""A log that is larger when its rank starts becomes `trainer-rank-1.log.1`, in place of an earlier one."""
_TAIL = 2000


def folder_of(environment: Mapping[str, str], run: Path) -> Path:
    """The folder of a run's logs on this machine. run: the run's folder, for a process that was started by hand."""
    return Path(environment[FOLDER]) if environment.get(FOLDER) else run / "logs"


class RankLog:
    """The log of one life of a rank. Lives append to one file."""

    def __init__(self, folder: Path, rank: int) -> None:
        """OSError when the file cannot be opened."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"trainer-rank-{rank}.log"
        if self.path.exists() and self.path.stat().st_size > LOG_BYTES:
            os.replace(self.path, f"{self.path}.1")
        self.file: BinaryIO = self.path.open("ab")
        self._start = self.path.stat().st_size

    def last_words(self) -> str:
        """The last line that this life has written; empty when it wrote none."""
        with self.path.open("rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - (64 << 10)))
            lines = [line for line in file.read().decode(errors="replace").strip().splitlines() if STARTED not in line]
        return lines[-1][:_TAIL] if lines else ""

    def close(self) -> None:
        """Close the file."""
        self.file.close()
