"""Operating-system processes of a run: started, watched, restarted within limits, never orphaned.

A child gets a session of its own, so that Ctrl-C in the terminal reaches only `headrace up`. The kernel kills it
when its parent ends, also on kill -9: the run's broker ends with `up`, so a child could not drain.

`keep_alive` is the one supervisor of processes: of actors, of the broker, of exporters. A process that ends by itself
is started again, within a restart intensity as in OTP: `KILLED` is for processes that a signal ended, `OUT_OF_MEMORY`
for those of them that the kernel ended for lack of memory, `BY_ITSELF` for processes that exited with an error, because
such a process has already restarted its actors several times. Beyond the limit it fails with the cause. A process that
SIGSTOP or SIGTSTP stops and nobody continues is killed and restarted, too; one that a debugger holds is left alone.
`headrace chaos` stops processes for up to 45 s. A start that fails for lack of space, memory or file descriptors is
tried again within `KILLED`.
"""

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from headrace import process_stat
from headrace.backoff import Intensity
from headrace.errors import BROKER, FAILED, GAVE_UP_LACKING, MACHINE, WRONG_INPUT, HeadraceError
from headrace.launch.supervision.causes import cause, oom_kills
from headrace.parent_death import die_with
from headrace.process_stat import LOOK_S, STOPPED_S, Stops
from headrace.python_modules import module_command


class ChildFailed(HeadraceError):
    """A process could not be kept alive; `exit_status` is that of the command."""

    def __init__(self, text: str, code: int) -> None:
        """code: the exit status of the process, as of `subprocess`."""
        super().__init__(text)
        self.exit_status = STATUS.get(code, FAILED)


class NotStarted(ChildFailed):
    """A process could not be started."""

    def __init__(self, name: str, why: str, error: OSError) -> None:
        """why: the reason without the name of the process."""
        super().__init__(f"{name} could not be started: {why}", MACHINE)
        self.why = why
        self.passes = error.errno in _PASSING
        """Whether a later attempt may succeed."""


KILLED = (20, 120.0)
BY_ITSELF = (2, 3600.0)
OUT_OF_MEMORY = (2, 3600.0)
"""Of those that a signal ended: the kernel's kills for lack of memory."""
FOR_GOOD = (WRONG_INPUT, MACHINE)
"""Exit codes after which a restart would fail again: wrong arguments, a machine that lacks something."""
STATUS = {WRONG_INPUT: WRONG_INPUT, MACHINE: MACHINE, BROKER: BROKER, GAVE_UP_LACKING: MACHINE}
"""Exit status of a process to that of the command; `FAILED` for all others."""
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
"""Errors of a start that may pass: processes, memory, file descriptors or space are lacking now."""


LOGS = "HEADRACE_LOGS"
"""Variable of every process with the folder of its log, in which a trainer's ranks have theirs."""
LOG_BYTES = 64 << 20
"""A log that is larger is rotated, so a process has at most about three times as much, unless it writes more within
`LOOK_S`."""


def rotate(log: Path) -> None:
    """Move a log that is too large to ``<log>.1``, in place of an earlier one.

    The process appends to the open file, so its end, at most twice `LOG_BYTES`, is copied and it is emptied; lines that
    are written in between are lost. A process may write faster than the copy goes.
    """
    with suppress(OSError):  # a full disk ends the run elsewhere (processes.py)
        size = log.stat().st_size
        if size > LOG_BYTES:
            left = min(size, 2 * LOG_BYTES)
            with log.open("rb") as source, log.with_name(f"{log.name}.1").open("wb") as copy:
                source.seek(size - left)
                while left and (piece := source.read(min(left, 1 << 20))):
                    left -= copy.write(piece)
            os.truncate(log, 0)


class Process(Protocol):
    """What `keep_alive` starts and watches."""

    name: str
    log: Path

    @property
    def pid(self) -> int:
        """Its process id; 0 before the first start."""

    async def start(self) -> object:
        """Start it. NotStarted when this machine refuses."""

    async def wait(self) -> int:
        """Its exit code, as of `subprocess`, once it has ended."""

    def sweep(self) -> None:
        """Kill the processes that it left behind."""


async def keep_alive(
    process: Process,
    on_restart: Callable[[str, str], None],
    *,
    for_good: Sequence[int] = FOR_GOOD,
    finishes: bool = False,
) -> None:
    """Keep a process running for as long as this is awaited. ChildFailed when it ends too often, or for good.

    on_restart: called with the name and the cause before each restart. for_good: exit codes after which it is not
    started again. finishes: code 0 means that its work is done; this then returns.
    """
    killed, by_itself, out_of_memory = Intensity(*KILLED), Intensity(*BY_ITSELF), Intensity(*OUT_OF_MEMORY)
    running = process.pid != 0
    while True:
        oom_before = oom_kills()
        if not running:
            try:
                await process.start()
            except NotStarted as failure:
                if not failure.passes or killed.exceeded():
                    raise
                on_restart(process.name, failure.why)
                await asyncio.sleep(killed.pause_s())
                continue
        code, frozen = await _ended(process)
        running = False
        process.sweep()
        if finishes and code == 0:
            return
        starved = not frozen and code == -signal.SIGKILL and oom_kills() > oom_before
        kind = by_itself if code > 0 else out_of_memory if starved else killed
        why = process_stat.stopped_too_long(frozen) if frozen else cause(code, process.log, oom_before)
        if code in for_good or kind.exceeded():
            raise ChildFailed(f"{process.name} could not be kept alive: {why} (log: {process.log})", code)
        on_restart(process.name, why)
        await asyncio.sleep(kind.pause_s())


async def _ended(process: Process) -> tuple[int, int]:
    """The exit code of the process, and its id when it was killed here because it had been stopped for long; until then
    its log is kept small."""
    ended, stops = asyncio.ensure_future(process.wait()), Stops()
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=LOOK_S)
            if ended.done():
                break
            if stops.seconds(process.pid, LOOK_S) >= STOPPED_S:
                os.kill(process.pid, signal.SIGKILL)
                return await ended, process.pid
            await asyncio.to_thread(rotate, process.log)
    finally:
        ended.cancel()
    return ended.result(), 0


class Child:
    """One process of the run and its log file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.env = env
        self.process: asyncio.subprocess.Process | None = None
        self._terminated = False

    @property
    def pid(self) -> int:
        """Process id of its latest start; 0 before the first."""
        return self.process.pid if self.process is not None else 0

    async def start(self) -> None:
        """Start it, appending to its log. NotStarted when this machine refuses; `keep_alive` tries again where that
        may pass."""
        parent = os.getpid()
        try:
            sink = self.log.open("ab")
        except OSError as error:
            raise NotStarted(self.name, f"its log {self.log} cannot be opened ({error.strerror})", error) from None
        with sink:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env=self.env | {LOGS: str(self.log.parent.resolve())},
                    start_new_session=True,
                    preexec_fn=lambda: die_with(parent, signal.SIGKILL),
                )
            except OSError as error:
                raise NotStarted(self.name, f"{self.argv[0]}: {error.strerror}", error) from None

    async def start_or_wait(self) -> None:
        """`start`, at which a failure that may pass is left to `keep_alive`. ChildFailed."""
        try:
            await self.start()
        except NotStarted as failure:
            if not failure.passes:
                raise

    async def wait(self) -> int:
        """Its exit code once it has ended."""
        assert self.process is not None
        return await self.process.wait()

    async def stop(self, patience_s: float, now: asyncio.Event | None = None) -> None:
        """SIGTERM once; SIGKILL to its whole session after `patience_s`, or as soon as `now` is set."""
        process = self.process
        if process is None:
            return
        if process.returncode is None and not self._terminated:
            self._terminated = True
            process.terminate()
        ended = asyncio.ensure_future(process.wait())
        at_once = asyncio.ensure_future((now or asyncio.Event()).wait())
        await asyncio.wait({ended, at_once}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        self.sweep()
        await ended

    def sweep(self) -> None:
        """Kill the rest of its session: the process itself and children that it left behind, in whatever group."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for pid in _session(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _session(leader: int) -> Iterator[int]:
    """The processes of a session."""
    return (pid for pid, stat in process_stat.everything() if stat.session == leader)


def actor_command(names: Sequence[str], *, config: Path, run: str, url: str, credentials: str) -> list[str]:
    """The command line that starts actors in a process, as an operator would type it."""
    return module_command(
        "headrace.cli",
        "actor",
        ",".join(names),
        "--config",
        str(config.resolve()),  # absolute: `headrace down` finds the run's processes by it
        "--run",
        run,
        "--url",
        url,
        "--credentials",
        credentials,
    )
