"""The cause of a death is one line: status, memory, last words."""

import json
import signal
from pathlib import Path

import pytest

from headrace.launch.supervision.causes import cause, ending, last_words, oom_kills


def line(**fields: str) -> str:
    return json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("plain words\n\n", "plain words"),
        (line(event="step_done", text="step 3"), "last event step_done: step 3"),
        (line(event="failed", error="ValueError: no") + line(event="drained", text=""), "ValueError: no"),
        (line(event="started") + "headrace: no broker answers\n", "no broker answers"),
    ],
)
def test_the_last_words_are_the_error_else_the_last_event(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == words


def test_a_cause_names_status_and_last_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line(event="started", text="process 7"))
    assert cause(3, tmp_path / "log", oom_kills()) == "code 3; last event started: process 7"
    assert cause(-signal.SIGTERM, tmp_path / "none", oom_kills()) == "signal 15 (SIGTERM); its log is empty"


def test_a_kill_while_the_kernel_ended_processes_for_memory_is_called_so() -> None:
    now = oom_kills()
    assert "out of memory" in ending(-signal.SIGKILL, now - 1)
    assert "out of memory" not in ending(-signal.SIGKILL, now)
    assert "out of memory" not in ending(-signal.SIGTERM, now - 1), "the kernel's choice gets no SIGTERM"


@pytest.mark.parametrize(
    "line", ["[" * 60_000, '{"error": "\\ud800"}', "\x1b" * 60_000, "\0", '{"error": [1, {"a": 2}]}']
)
def test_words_that_a_process_may_write_can_be_printed(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(line)
    words = last_words(tmp_path / "log")
    assert words.isprintable() and len(words.encode()) <= 2000
