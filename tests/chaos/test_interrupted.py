"""The measurement of several parts ends with the part that a signal ended, and leaves no process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

# The parts of the measurement are two processes: the first gets the signal, the second writes a file.
PARTS = """
import signal, sys
from benchmarks import chaos
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
sleeper = "import sys, time; print('part', __import__('os').getpid(), file=sys.stdout, flush=True); time.sleep(600)"
if sys.argv[1] == "alone":
    sleeper = "import os; os.kill(os.getpid(), 2)"
second = "open(%r, 'w')" % sys.argv[2]
chaos.parts = lambda args: {"first": (sys.executable, "-c", sleeper), "second": (sys.executable, "-c", second)}
sys.argv = ["chaos", "--folder", sys.argv[3], "--out", sys.argv[3] + "/out.json"]
try:
    sys.exit(chaos.main())
except KeyboardInterrupt:
    sys.exit(chaos.INTERRUPTED)
"""
ROOT = Path(__file__).resolve().parents[2]


def measurement(tmp_path: Path, how: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PARTS, how, str(tmp_path / "second"), str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_ends_the_part_under_way_and_starts_no_other(tmp_path: Path) -> None:
    with measurement(tmp_path, "both") as process:
        assert process.stderr is not None
        part = int(process.stderr.readline().split()[1])
        handle = os.pidfd_open(part)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert not Path(f"/proc/{part}").exists(), "the part is still there"
        os.close(handle)
    assert not (tmp_path / "second").exists()


def test_a_part_that_a_signal_ends_alone_ends_the_measurement(tmp_path: Path) -> None:
    with measurement(tmp_path, "alone") as process:
        assert process.wait() == 130
    assert not (tmp_path / "second").exists()
