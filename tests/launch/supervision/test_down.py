"""`down` and a supervisor that ends when it is told, when it is told twice, or never."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.launch.supervision import down
from tests.support.patience import PATIENCE_S

SUPERVISOR = """
import signal, subprocess, sys
from pathlib import Path
from headrace.launch import runs
held = runs.lock(Path(sys.argv[1]))
told = 0
def tell(*_):
    global told
    told += 1
    if told == int(sys.argv[3]):
        sys.exit(130)
signal.signal(signal.SIGTERM, tell)
subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3600)", sys.argv[2]])
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("ends_at", "drain_s", "at_once_s", "says"),
    [
        (1, PATIENCE_S, PATIENCE_S, "it ended in order"),
        (2, 0.2, PATIENCE_S, "it had not drained after 0.2 s, so it ended at once"),
        (9, 0.2, 0.1, "it had not ended after 0.3 s, so it was killed"),
    ],
)
def test_every_supervisor_ends_and_down_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: int, drain_s: float, at_once_s: float, says: str
) -> None:
    monkeypatch.setattr(down, "AT_ONCE_S", at_once_s)
    monkeypatch.setattr(down, "BY_THEMSELVES_S", 0.0)
    run = tmp_path / "r1"
    run.mkdir()
    words = [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(run / "config.json"), str(ends_at)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdout.readline() == b"up\n"
        assert down.supervisor_of(tmp_path) == supervisor.pid
        ended = down.down(tmp_path, run, drain_s)
        assert ended == (supervisor.pid, says, 1, 0), "its child did not die with it: that is the left-over"
    assert down.down(tmp_path, run, drain_s) == (0, "no process of `headrace up` was active", 0, 0)
