"""Operating-system processes of a run: started, watched, restarted within reason, never orphaned.

A child gets a session of its own, so that Ctrl-C in the terminal reaches only `headrace up`, and a parent-death signal,
so that it ends when `up` is killed. A child that ends without being told to is started again, within a restart
intensity as in OTP: `KILLED` is for processes that were killed, `BY_ITSELF` for those that gave up, because such a one
has started its actors again several times before. Beyond it the run ends, with the reason from the child's log.
"""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Runs in the child between fork and exec: SIGTERM when the parent goes, whatever killed it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class ChildFailed(Exception):
    """A process could not be kept alive; one sentence says why, `code` is how it ended."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Intensity:
    """At most `most` restarts in `period_s`."""

    def __init__(self, most: int, period_s: float) -> None:
        self.most, self.period_s = most, period_s
        self._moments: deque[float] = deque()

    def exceeded(self) -> bool:
        """Count a restart; whether it is one too many."""
        now = time.monotonic()
        self._moments.append(now)
        while now - self._moments[0] > self.period_s:
            self._moments.popleft()
        return len(self._moments) > self.most

    def pause_s(self) -> float:
        """How long to wait before the next start."""
        return min(0.2 * len(self._moments), 2.0)


KILLED = (20, 120.0)
BY_ITSELF = (2, 600.0)
FOR_GOOD = (2, 3)
"""Exit codes after which another start would say the same: bad arguments, a machine that can't do it."""


class Child:
    """One process of the run and its log file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.env = env
        self.restarts = 0
        self.process: asyncio.subprocess.Process | None = None
        self._told = False
        self._killed, self._by_itself = Intensity(*KILLED), Intensity(*BY_ITSELF)

    async def start(self) -> None:
        """Start it, appending to its log."""
        parent = os.getpid()
        with self.log.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self.env,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )

    def reason(self) -> str:
        """Why it ended, as the end of its log tells."""
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        for line in reversed(lines[-40:]):
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "error" in record:
                    return str(record["error"])
            if line.startswith("headrace: "):
                return line.removeprefix("headrace: ")
        return lines[-1].strip() if lines else "it said nothing"

    async def watch(self, on_restart: Callable[[str, int], None]) -> None:
        """Keep it running for as long as this is awaited. ChildFailed when it ends too often, or for good."""
        while True:
            if self.process is None:
                await self.start()
            assert self.process is not None
            code = await self.process.wait()
            self._sweep()
            kind = self._by_itself if code > 0 else self._killed
            if code in FOR_GOOD or kind.exceeded():
                raise ChildFailed(f"{self.name} can't be kept alive: {self.reason()} (its log: {self.log})", code)
            self.restarts += 1
            on_restart(self.name, code)
            await asyncio.sleep(kind.pause_s())
            self.process = None

    async def stop(self, patience_s: float, now: asyncio.Event | None = None) -> None:
        """SIGTERM once, then SIGKILL to its whole session when patience ends, or at once when `now` is set."""
        process = self.process
        if process is None:
            return
        if process.returncode is None and not self._told:
            self._told = True
            process.terminate()
        ended = asyncio.ensure_future(process.wait())
        hurry = asyncio.ensure_future((now or asyncio.Event()).wait())
        await asyncio.wait({ended, hurry}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self._sweep()
        await ended

    def _sweep(self) -> None:
        """End what is left of its session: itself, and whatever it started and left behind."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def actor_command(names: Sequence[str], *, config: Path, run: str, url: str, credentials: str) -> list[str]:
    """The command line that starts actors in a process; an operator types the same."""
    return [
        sys.executable,
        "-m",
        "headrace.cli",
        "actor",
        ",".join(names),
        "--config",
        str(config),
        "--run",
        run,
        "--url",
        url,
        "--credentials",
        credentials,
    ]
