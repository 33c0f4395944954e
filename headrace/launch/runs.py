"""A run on disk: the layout of its folder, how it is found again, and the lock that lets one run be active.

<run.dir>/<id>/ config.json broker/ logs/ snapshots/ checkpoints/ nodes/ report.json report.html
<run.dir>/latest -> the newest
"""

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from headrace.errors import WRONG_INPUT, HeadraceError


class RunError(HeadraceError, exit_status=WRONG_INPUT):
    """The run cannot be found or started; `exit_status` is that of the process."""

    def __init__(self, text: str, exit_status: int = WRONG_INPUT) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class RunDir(NamedTuple):
    """The folder of one run."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id is its folder's name."""
        return self.path.name

    @property
    def broker(self) -> Path:
        """The broker's folder: store, credentials per role (mode 0600), log, and the address on which it listens."""
        return self.path / "broker"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.path / "logs"

    @property
    def config(self) -> Path:
        """The configuration of the run, with defaults and overrides."""
        return self.path / "config.json"


def new_id(seed: int) -> str:
    """An id that sorts by time and is legal in a subject."""
    return time.strftime("r%Y%m%d-%H%M%S") + f"-s{seed}"


def create(root: Path, run: str, *, newest: bool = True) -> RunDir:
    """Create the folder of a new run. newest: point `latest` at it. RunError when that fails."""
    try:
        path = root / run
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)  # records, logs and keys are for this user alone
        for folder in (path / "logs", path / "snapshots", path / "checkpoints", path / "nodes"):
            folder.mkdir(parents=True, exist_ok=True)
        if newest:
            latest = root / "latest"
            latest.unlink(missing_ok=True)
            latest.symlink_to(run)
    except OSError as error:
        raise RunError(f"cannot write to {root}: {error.strerror}", 3) from None
    return RunDir(path)


class _FinishedReport(msgspec.Struct):
    steps: int


def refuse_finished(root: Path, run: str, steps: int) -> None:
    """RunError when a run has all its steps already: it would end with code 0 and have trained nothing."""
    path = root / run / "report.json"
    if not run or not path.is_file():
        return
    done = msgspec.json.decode(path.read_bytes(), type=_FinishedReport).steps
    if done >= steps:
        raise RunError(
            f"run {run} has ended after {done} steps and would train nothing: set [curriculum] steps above {done} to "
            "continue it, or another [run] id to start a new run"
        )


def require_disk(root: Path, need_mb: int) -> None:
    """RunError (3) when less than `need_mb` MiB are free."""
    free = shutil.disk_usage(root).free >> 20
    if free < need_mb:
        raise RunError(f"the disk of {root}/ has {free} MiB free and a run needs {need_mb}: free some space first", 3)


def find(run: str, root: Path = Path("runs")) -> RunDir:
    """Find a run by id, path or `latest`. RunError when there is none."""
    for candidate in (Path(run), root / run):
        if candidate.is_dir():
            return RunDir(candidate.resolve())
    newest = sorted(path.name for path in root.glob("r*") if path.is_dir())[-5:]
    raise RunError(
        f"there is no run {run!r} in {root}/; " + (f"the newest are {', '.join(newest)}" if newest else "it is empty")
    )


def lock(root: Path) -> IO[str]:
    """Lock the folder for one active run; the kernel releases the lock with the process. RunError (5) when taken."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = (root / ".active").open("a+")
    except OSError as error:
        raise RunError(f"cannot write to {root}/: {error.strerror}", 3) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        holder = handle.read().strip() or "another process"
        handle.close()
        raise RunError(
            f"a run is active in {root}/ already ({holder}): wait for it, stop it, or set [run] dir", 5
        ) from None
    try:
        handle.truncate(0)
        handle.write(f"pid {os.getpid()}")
        handle.flush()
    except OSError as error:
        raise RunError(f"cannot write to {root}/: {error.strerror}", 3) from None
    return handle
