"""A child ends with its parent, also one that is killed."""

import os
import select
import signal
import subprocess
import sys

import pytest

PARENT = """
import os, subprocess, sys
from headrace.parent_death import die_with, ending_with_parent
parent = os.getpid()
if sys.argv[1] == "between fork and exec":
    child = subprocess.Popen(["sleep", "300"], preexec_fn=lambda: die_with(parent))
else:
    child = subprocess.Popen(ending_with_parent(["sleep", "300"]))
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["between fork and exec", "command line"])
def test_a_child_ends_with_a_killed_parent(way: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT, way], text=True, **pipes) as parent:  # type: ignore[call-overload]
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([child], [], [], 0)[0]
            parent.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], 20)[0], "the child outlived its parent"
        finally:
            os.close(child)
