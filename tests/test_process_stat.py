"""The fields of /proc/PID/stat, also of a process whose name looks like other fields."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import process_stat

# The child sets its own name, as any program can, and says so.
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "name", [b"plain", b"two words", b"a) R 1 1 1 1", b"(((", b"))) 9", b"line\nend", b"\xff\xfe)\xe9"]
)
def test_any_name_of_a_process_is_read(name: bytes) -> None:
    words = [sys.executable, "-S", "-c", NAMED, name.hex()]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert Path(f"/proc/{child.pid}/comm").read_bytes() == name + b"\n"
        stat = process_stat.read(child.pid)
        assert stat is not None and (stat.parent, stat.session) == (os.getpid(), child.pid)
        assert dict(process_stat.everything())[child.pid].session == child.pid
        child.communicate()
    assert process_stat.read(child.pid) is None


def test_the_time_of_this_process_and_of_its_children() -> None:
    before = process_stat.read(os.getpid())
    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done"], check=True)
    after, clock = process_stat.read(os.getpid()), os.times()
    assert before is not None and after is not None
    assert after.reaped_cpu_s > before.reaped_cpu_s
    assert after.cpu_s == pytest.approx(clock.user + clock.system, abs=0.2)
    assert after.reaped_cpu_s == pytest.approx(clock.children_user + clock.children_system, abs=0.02)
