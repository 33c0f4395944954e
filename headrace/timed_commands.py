"""Runs a command with a time limit that also holds for the processes that the command starts.

`subprocess.run` ends only the command itself at its limit: the `git index-pack` of a `git clone` goes on. Here the
command leads a process group, and the whole group is ended. When this process is killed, the kernel ends the command at
once, and the others of its group when they have used as many seconds of CPU time as the limit allows.
"""

import math
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.parent_death import die_with


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
    parent, cpu_s = os.getpid(), math.ceil(timeout_s)

    def prepare() -> None:
        die_with(parent, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))

    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=prepare,
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
