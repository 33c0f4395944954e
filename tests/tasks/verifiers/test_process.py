"""The requests to a taskset's environment, with a process that answers them well, badly and not at all."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.tasks.verifiers.process import Source, VerifiersError, Worker, python_of

PEER = """
import json, os, signal, sys
print("a line of the taskset", file=sys.stderr, flush=True)
if sys.argv[-1] == "{}":
    say = lambda value: print(json.dumps(value), flush=True)
    say({"version": "1", "source": "ab"})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "task":
            say({"id": str(asked["number"])} if asked["number"] < min(3, asked["count"] or 3) else {"end": True})
        elif asked.get("text") == "hang":
            signal.pause()
        elif asked.get("text") == "die":
            os._exit(3)
        elif asked.get("text") == "raise":
            say({"error": "ValueError: no"})
        elif asked.get("text") == "noise":
            print("not JSON", flush=True)
        elif asked.get("text") == "other":
            say({"reward": "much"})
        else:
            say({"reward": asked["data"]["worth"], "answer": "42"})
else:
    print(sys.argv[-1], flush=True)
"""
DATA = '{"worth": 0.5}'


def source(folder: Path, config: str = "{}") -> Source:
    (folder / "peer.py").write_text(PEER)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {folder}/peer.py "$@"\n')
    python.chmod(0o755)
    return Source(python=str(python), taskset="sums", config=config)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(source(tmp_path))
    yield worker
    worker.close()


def test_tasks_are_read_from_any_number_on(worker: Worker) -> None:
    assert [line["id"] for line in worker.tasks()] == ["0", "1", "2"]
    assert [line["id"] for line in worker.tasks(count=2, start=1)] == ["1"]
    assert (worker.version, worker.digest, worker.answer({"worth": 1}, 60.0)) == ("1", "ab", "42")


def test_a_reward_that_raises_leaves_the_worker_open(worker: Worker) -> None:
    with pytest.raises(VerifiersError, match="ValueError: no"):
        worker.score(DATA, "raise", 60.0)
    assert worker.alive and worker.score(DATA, "fine", 60.0) == 0.5


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [
        ("hang", 0.05, "no answer within 0.05 s"),
        ("die", 60.0, "ended with code 3: a line of the taskset"),
        ("noise", 60.0, "expected a JSON object .* got b'not JSON'"),
        ("other", 60.0, "expected a line with a reward"),
    ],
)
def test_a_worker_that_does_not_answer_is_ended(worker: Worker, text: str, seconds: float, why: str) -> None:
    with pytest.raises(VerifiersError, match=why):
        worker.score(DATA, text, seconds)
    assert not worker.alive
    with pytest.raises(VerifiersError, match="has been closed"):
        worker.score(DATA, "fine", 60.0)


@pytest.mark.parametrize(
    ("first", "why"), [('{"error": "no such taskset"}', "no such taskset"), ('{"version": "1"}', "a line with source")]
)
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, first: str, why: str) -> None:
    with pytest.raises(VerifiersError, match=why):
        Worker(source(tmp_path, first))


def test_an_interpreter_is_named_by_its_folder_too(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert python_of(tmp_path) == python_of(tmp_path / "bin" / "python") == str(tmp_path / "bin" / "python")
    with pytest.raises(VerifiersError, match="expected a Python interpreter"):
        python_of(tmp_path / "bin")
