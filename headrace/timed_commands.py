"""Runs a command with a time limit that also holds for the processes that the command starts.

`subprocess.run` ends only the command itself at its limit: the `git index-pack` of a `git clone` goes on. Here the
command leads a process group, and the whole group is ended. When this process is killed, the kernel ends the command at
once, and the others of its group when they have used as many seconds of CPU time as the limit allows.

`setpriv` and a shell prepare that and become the command. Without a `preexec_fn`, Python starts a process by vfork: a
fork copies the page tables of this process, which takes 26 ms of CPU time in one of 400 MB, and vfork takes 1 ms.
"""

import errno
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PREPARE = (
    *(shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL", "--", "/bin/sh", "-c"),
    'test "$PPID" = "$1" || exit 1; ulimit -t "$2" || exit 1; unset PWD; shift 2; exec "$@"',
    "sh",
)
"""The parent's process id, seconds of CPU time and the command follow. The command does not start when the parent has
ended before setpriv's call."""


def run(
    argv: Sequence[str],
    timeout_s: float,
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    data: bytes = b"",
    end_s: float = 0.0,
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command and return its exit code and output. data: its standard input; end_s: how long it may take to end
    by SIGTERM, for a command that removes its own files; 0: it is killed at once.

    TimeoutExpired when it, or a child with its output, runs longer than `timeout_s`; OSError when it cannot be started.
    """
    prepare = *_PREPARE, str(os.getpid()), str(math.ceil(timeout_s)), _program(argv[0], cwd, env)
    with subprocess.Popen(
        [*prepare, *argv[1:]],
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    ) as process:
        try:
            output, errors = process.communicate(data, timeout_s)
        finally:
            if end_s and process.poll() is None:
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(end_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


def _program(name: str, cwd: str | Path | None, env: Mapping[str, str] | None) -> str:
    """The path of a program. OSError, as from the start of a command without a shell."""
    place = os.path.join(cwd or "", name) if os.path.dirname(name) else name
    path = shutil.which(place, path=os.pathsep.join(os.get_exec_path(env)))
    if path is None:
        code = errno.EACCES if os.path.dirname(name) and os.path.exists(place) else errno.ENOENT
        raise OSError(code, os.strerror(code), name)
    return os.path.abspath(path)
