"""A child ends with its parent, also one that is killed."""

import os
import select
import signal
import subprocess
import sys

PARENT = """
import os, subprocess, sys
from headrace.parent_death import die_with
parent = os.getpid()
child = subprocess.Popen(["sleep", "300"], preexec_fn=lambda: die_with(parent))
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_ends_with_a_killed_parent() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], text=True, **pipes) as parent:  # type: ignore[call-overload]
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([child], [], [], 0)[0]
            parent.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], 20)[0], "the child outlived its parent"
        finally:
            os.close(child)
