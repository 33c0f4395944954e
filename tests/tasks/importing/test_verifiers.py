"""A taskset of verifiers: imported and scored by a Python of its own. `make test-clients` installs verifiers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.judging import verifiers as checker
from headrace.judging.checkers import CheckerError, check
from headrace.messages.tasks import Oracle
from headrace.registry import PluginError, admit
from headrace.tasks import Suite, open_suite
from headrace.tasks.importing import verifiers as importer
from tests.support.paths import ROOT
from tests.support.playing import played

pytestmark = pytest.mark.anyio
VERIFIERS = ROOT / ".cache" / "clients" / "verifiers" / "bin" / "python"
TASKSET = """
import time
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]
print("a taskset may print")

class SumsData(vf.TaskData):
    answer: str

class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "6":
            time.sleep(3600)
        if "raise" in trace.last_reply:
            raise RuntimeError("the reward is broken")
        return float(self.data.answer in trace.last_reply.split())

    @vf.reward(weight=0.5)
    async def short(self, task: SumsData, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

class SumsConfig(vf.TasksetConfig):
    size: int = 2

class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(self.config.size):
            image = "python:3.11" if n == 2 else None
            data = SumsData(
                id=f"sum/{n}", prompt=f"{n} + {n}?", system_prompt="Be short.", answer=str(2 * n), image=image
            )
            yield SumsTask(data, self.config.task)
"""


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """The workers of the checker end with the test."""
    yield
    for worker in checker._workers.values():
        worker.close()
    checker._workers.clear()


def environment(folder: Path, python: str) -> Path:
    """An interpreter that finds the taskset `sums_v1`."""
    (folder / "sums_v1.py").write_text(TASKSET)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {python} "$@"\n')
    path.chmod(0o755)
    return path


def imported(folder: Path, python: Path, *options: str) -> Suite:
    suites = folder / "suites"
    words = ["tasks", "import", "verifiers", "sums_v1", "--name", "sums", "--python", str(python)]
    assert main([*words, "--set", f"tasks.dir={suites}", *options]) == 0
    return open_suite("sums", suites)


def test_an_environment_without_verifiers_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = environment(tmp_path, f"{sys.executable} -S")
    words = ["tasks", "import", "verifiers", "sums_v1", "--set", f"tasks.dir={tmp_path}"]
    assert main([*words, "--python", str(python)]) != 0
    assert "No module named 'verifiers'" in capsys.readouterr().err
    assert main(words) != 0
    assert "needs --python" in capsys.readouterr().err


@pytest.mark.clients
async def test_the_rewards_of_a_taskset_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert VERIFIERS.exists(), "`make test-clients` makes it"
    monkeypatch.setattr(importer, "ANSWER_S", 10.0)  # the rewards of sum/3 never end
    python = environment(tmp_path, str(VERIFIERS))
    size = ("--taskset-config", '{"size": 5}')
    suite = imported(tmp_path, python, *size)
    report = json.loads((tmp_path / "suites" / "sums" / "import.json").read_text())
    refused = {refusal["id"]: refusal["reason"] for refusal in report["refused"]}
    assert list(refused) == ["sum__2", "sum__3"], "the tasks after a reward that never ends are imported"
    assert "container" in refused["sum__2"] and "no answer within 10 s" in refused["sum__3"]

    task, oracle = suite.task("sum__1"), suite.oracle("sum__1")
    assert (task.prompt, task.system, task.sandbox, oracle.answer) == ("1 + 1?", "Be short.", False, "2")
    assert "answer" not in task.prompt and not task.files, "the agent's part does not hold the task's data"
    admit("checkers", [f"{oracle.grading.reference['python']}:sums_v1"])
    passed, failed = [await played(None, suite, "sum__1", policy) for policy in ("oracle", "idle")]
    assert (passed.decision, passed.value) == ("passed", 1.5)
    assert (failed.decision, failed.value) == ("failed", 0.5)

    capsys.readouterr()
    imported(tmp_path, python, *size)
    assert "3 tasks (0 new), 2 refused" in capsys.readouterr().out, "an import goes on where it stopped"
    assert list(imported(tmp_path, python, *size, "--count", "1").ids()) == ["sum__0"]

    (tmp_path / "sums_v1.py").write_text(TASKSET + "\n")
    assert await graded(oracle, "2") == 1.5, "a worker goes on with the code that it has loaded"
    checker._workers.popitem()[1].close()
    with pytest.raises(PluginError, match="import the suite again"):
        await graded(oracle, "2")


@pytest.mark.clients
async def test_a_reward_that_raises_is_named(tmp_path: Path) -> None:
    assert VERIFIERS.exists(), "`make test-clients` makes it"
    suite = imported(tmp_path, environment(tmp_path, str(VERIFIERS)))
    oracle = suite.oracle("sum__1")
    with pytest.raises(CheckerError, match="the reward is broken"):
        await graded(oracle, "please raise")
    assert await graded(oracle, "2") == 1.5, "the worker goes on"


async def graded(oracle: Oracle, text: str) -> float:
    """The checker's number for a message."""
    told = oracle.grading.reference
    admit("checkers", [f"{told['python']}:{told['taskset']}"])
    return await check(oracle, "", text)
