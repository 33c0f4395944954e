"""The progress line: in place on a terminal, a line a minute elsewhere."""

import os
import pty
import subprocess
import sys

SCRIPT = """
from headrace.launch import output
for share in (10, 20, 30):
    output.show(f"{share} % of a run whose line is wider than the terminal is")
output.say("evaluation ended")
output.show("40 %")
output.end_progress()
output.say("done")
"""
WIDTH = 30


def written(term: str) -> bytes:
    """The output of the script on a terminal of this kind."""
    near, far = pty.openpty()
    os.system(f"stty cols {WIDTH} < {os.ttyname(far)}")
    environment = os.environ | {"TERM": term}
    environment.pop("COLUMNS", None)
    subprocess.run([sys.executable, "-c", SCRIPT], stdout=far, env=environment, check=True, timeout=60)
    os.close(far)
    text = os.read(near, 65536)
    os.close(near)
    return text.replace(b"\r\n", b"\n")


def test_a_terminal_shows_one_line_that_changes_and_news_above_it() -> None:
    line = b"30 % of a run whose line is wider than the terminal is"[: WIDTH - 1]
    end = written("xterm")[written("xterm").index(b"30 %") :]
    assert end == line + b"\r\x1b[Kevaluation ended\n" + line + b"\r\x1b[K40 %\ndone\n"


def test_a_dumb_terminal_and_a_pipe_get_no_escapes() -> None:
    lines = "10 % of a run whose line is wider than the terminal is\nevaluation ended\ndone\n"
    assert written("dumb").decode() == lines
    piped = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert piped.stdout == lines
