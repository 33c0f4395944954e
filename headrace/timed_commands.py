"""Runs a command with a time limit that also holds for the processes that the command starts.

`subprocess.run` ends only the command itself at its limit: the `git index-pack` of a `git clone` goes on. Here the
command leads a process group, and the whole group is ended. When this process is killed, the kernel ends the command at
once, and the others of its group when they have used as many seconds of CPU time as the limit allows.

`parent_death.ending_with_parent` prepares that in the command line, so that the command starts by vfork.
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

from headrace.parent_death import ending_with_parent


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
    limit = f"ulimit -t {math.ceil(timeout_s)} || exit 1; unset PWD"
    with subprocess.Popen(
        ending_with_parent([_program(argv[0], cwd, env), *argv[1:]], signal.SIGKILL, limit),
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
