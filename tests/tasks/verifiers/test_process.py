"""The requests to a taskset's environment, with a process that answers them well, badly and not at all."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.tasks.verifiers import process
from headrace.tasks.verifiers.process import TasksetSource, TasksetWorker, VerifiersError, python_of

PEER = """
import json, os, signal, sys
print("a line of the taskset", file=sys.stderr, flush=True)
if sys.argv[-1] == "{}":
    say = lambda value: print(json.dumps(value), flush=True)
    say({"version": "1", "source": "ab"})
    for line in sys.stdin:
        asked = json.loads(line)
        turn, text = {"request": asked.get("request", 0)}, asked.get("text", "")
        if asked["do"] == "task" and asked["number"] == 2 and asked["count"] == 9:
            say(turn | {"id": "2"})
        elif asked["do"] == "task":
            task = {"id": str(asked["number"]), "data": {}, "prompt": "p", "system": "", "time_s": 0.0, "notes": []}
            say(turn | (task if asked["number"] < min(3, asked["count"] or 3) else {"end": True}))
        elif text == "hang":
            signal.pause()
        elif text == "die":
            os._exit(3)
        elif text == "close":
            os.close(1)
            signal.pause()
        elif text == "raise":
            say(turn | {"error": "ValueError: no"})
        elif text.startswith("{") or text in ("noise", "deep"):
            print({"noise": "not JSON", "deep": "[" * 100_000}.get(text) or text % turn["request"], flush=True)
        else:
            say(turn | {"reward": asked["data"]["worth"], "answer": "42"})
            if text == "twice":
                say(turn | {"reward": 1.0})
            if text == "deaf":
                signal.pause()
else:
    print(sys.argv[-1], flush=True)
"""
DATA = '{"worth": 0.5}'


def source(folder: Path, config: str = "{}") -> TasksetSource:
    (folder / "peer.py").write_text(PEER)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {folder}/peer.py "$@"\n')
    python.chmod(0o755)
    return TasksetSource(python=str(python), taskset="sums", config=config)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[TasksetWorker]:
    worker = TasksetWorker(source(tmp_path))
    yield worker
    worker.close()


def test_tasks_are_read_from_any_number_on(worker: TasksetWorker) -> None:
    assert [line["id"] for line in worker.tasks()] == ["0", "1", "2"]
    assert [line["id"] for line in worker.tasks(count=2, start=1)] == ["1"]
    assert (worker.version, worker.digest, worker.answer({"worth": 1}, 60.0)) == ("1", "ab", "42")


def test_a_reward_that_raises_leaves_the_worker_open(worker: TasksetWorker) -> None:
    with pytest.raises(VerifiersError, match="ValueError: no"):
        worker.score(DATA, "raise", 60.0)
    assert worker.alive and worker.score(DATA, "fine", 60.0) == 0.5


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [
        ("hang", 0.05, "no answer within 0.05 s"),
        ("die", 60.0, "ended with code 3: a line of the taskset"),
        ("close", 60.0, "closed its output: a line of the taskset"),
        ("noise", 60.0, "expected a JSON object .* got b'not JSON'"),
        ("deep", 60.0, "expected a JSON object"),
        ('{"request": %d, "reward": "much"}', 60.0, "expected a line with a reward"),
        ('{"request": %d, "reward": true}', 60.0, "expected a line with a reward"),
        ('{"request": %d, "reward": NaN}', 60.0, "expected a line with a reward"),
        ('{"request": %d, "reward": 1' + "0" * 400 + "}", 60.0, "expected a line with a reward"),
        ('{"reward": 1.0, "n": %d}', 60.0, "expected the answer to request 1 .* got one to 0"),
    ],
)
def test_a_worker_that_does_not_answer_is_ended(
    worker: TasksetWorker, text: str, seconds: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text == "close":
        monkeypatch.setattr(process, "_END_S", 0.05)
    with pytest.raises(VerifiersError, match=why):
        worker.score(DATA, text, seconds)
    assert not worker.alive
    with pytest.raises(VerifiersError, match="has been closed"):
        worker.score(DATA, "fine", 60.0)


def test_a_second_answer_is_not_taken_for_the_reward_of_the_next_message(worker: TasksetWorker) -> None:
    assert worker.score(DATA, "twice", 60.0) == 0.5
    with pytest.raises(VerifiersError, match=r"expected the answer to request 2 .* got one to 1"):
        worker.score(DATA, "fine", 60.0)
    assert not worker.alive


def test_a_worker_that_does_not_read_its_request_is_ended(worker: TasksetWorker) -> None:
    assert worker.score(DATA, "deaf", 60.0) == 0.5
    with pytest.raises(VerifiersError, match=r"no answer within 0\.2 s"):
        worker.score(DATA, "x" * (1 << 20), 0.2)
    assert not worker.alive


def test_a_task_that_lacks_a_field_ends_the_worker(worker: TasksetWorker) -> None:
    with pytest.raises(VerifiersError, match=r"expected a task .* missing required field `data`"):
        list(worker.tasks(count=9))
    assert not worker.alive


@pytest.mark.parametrize(
    ("first", "why"), [('{"error": "no such taskset"}', "no such taskset"), ('{"version": "1"}', "a line with source")]
)
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, first: str, why: str) -> None:
    with pytest.raises(VerifiersError, match=why):
        TasksetWorker(source(tmp_path, first))


def test_an_interpreter_is_named_by_its_folder_too(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert python_of(tmp_path) == python_of(tmp_path / "bin" / "python") == str(tmp_path / "bin" / "python")
    with pytest.raises(VerifiersError, match="expected a Python interpreter"):
        python_of(tmp_path / "bin")
