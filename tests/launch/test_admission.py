"""The names from outside that a process may import: those of the operator's configuration, and no others."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.bus.broker.server import Server
from headrace.bus.nats.streams import declare
from headrace.cli.main import main
from headrace.config import Algorithm, Config, ConfigError, Engine, Environment, Evaluation, Run, Tasks, load, parse
from headrace.launch import admission, runs
from headrace.launch.measuring.evaluation import open_run, policy_of
from headrace.launch.processes import Run as Processes
from headrace.launch.runs import RunDir, RunError
from headrace.launch.supervision.signals import Stopping
from headrace.registry import admitted
from tests.support.keys import as_writers
from tests.support.records import RUN

NAMES = """
[run.plugins]
checkers = ["marked:checker", "/opt/tasksets/bin/python:gsm8k"]
[tasks]
suite = "mix/marked:suite/a*3+marked.other:suite/b+generated/train"
heldout = "marked:held/x"
unseen = "a folder"
tools = ["read_file", "marked:tool", "server/tool"]
[evaluation]
every_suites = ["marked:every"]
[engine]
kind = "marked:engine"
[environment]
backend = "marked:backend"
[algorithm]
reward = "marked:reward"
advantage = "marked:advantage"
weighting = "marked:loss"
[policy]
renderer = "marked:renderer"
[[mid_training.data]]
kind = "marked:reader"
path = "x"
"""
FOUND = {
    "tools": ("marked:tool",),
    "engines": ("marked:engine",),
    "sandboxes": ("marked:backend",),
    "suites": ("marked.other:suite", "marked:every", "marked:held", "marked:suite"),
    "rewards": ("marked:reward",),
    "renderers": ("marked:renderer",),
    "advantages": ("marked:advantage",),
    "losses": ("marked:loss",),
    "checkers": ("/opt/tasksets/bin/python:gsm8k", "marked:checker"),
    "readers": ("marked:reader",),
}


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Whether the module `marked`, which writes a file when it is imported, was imported."""
    file = tmp_path / "imported"
    (tmp_path / "marked.py").write_text(
        f"open({str(file)!r}, 'w').close()\n\ndef reward(judged):\n    return 0.25\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file.exists
    sys.modules.pop("marked", None)


def test_the_operators_file_admits_each_name_that_it_has_and_a_recorded_one_none(tmp_path: Path) -> None:
    file, recorded = tmp_path / "own.toml", tmp_path / "config.json"
    file.write_text(NAMES)
    recorded.write_bytes(msgspec.json.encode(parse(NAMES)))
    load(file)
    load(recorded)
    assert admitted() == {}
    assert admission.own(file) == load(recorded)
    assert admitted() == FOUND


def test_a_command_line_admits_what_it_says() -> None:
    admission.changes(["algorithm.reward=marked:reward", "judge.model_url=http://127.0.0.1:1", "nothing"])
    assert admission.suite("marked:suite/x") == "marked:suite/x"
    assert admitted() == {"rewards": ("marked:reward",), "suites": ("marked:suite",)}
    assert admission.plugin("rewards=marked:reward") == ("rewards", "marked:reward")
    for wrong in ("marked:reward", "bus=marked:reward", "rewards=half", "rewards"):
        with pytest.raises(ConfigError, match="expected SEAM=MODULE:ATTRIBUTE"):
            admission.plugin(wrong)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("rewards = ['half']", r"run\.plugins\.rewards: expected module:attribute, got 'half'"),
        ("bus = ['m:a']", r"run\.plugins: expected keys among tools, .*, got 'bus'"),
    ],
)
def test_a_table_of_plugins_is_checked(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(f"[run.plugins]\n{setting}\n")


def test_processes_do_not_start_under_names_of_a_recorded_run(tmp_path: Path) -> None:
    """Children take their file for the operator's own: a recorded run would admit itself by them."""
    root = tmp_path / "runs"
    folder = runs.create(root, "r1")
    recorded = Config(algorithm=Algorithm(reward="marked:reward"), run=Run(plugins={"checkers": ("marked:checker",)}))
    folder.config.write_bytes(msgspec.json.encode(recorded))
    settings = Config(run=Run(dir=str(root)))
    stopping, closing = Stopping(), None
    with pytest.raises(RunError, match=r"run\.plugins\.rewards=\[\"marked:reward\"\]"):
        open_run(settings, policy_of("r1"), stopping, closing)  # type: ignore[arg-type]
    assert not (folder.path / "config-eval.json").exists()
    with pytest.raises(RunError, match="marked:checker"):
        Processes(Config(run=recorded.run), RunDir(folder.path), folder.path / "again.json", stopping)
    assert not (folder.path / "again.json").exists()


@pytest.mark.parametrize("changes", [{"python": "/tmp/python"}, {"url": "http://10.0.0.1:1"}, {"args": ("--x",)}])
def test_a_recorded_run_starts_no_program_and_names_no_server(tmp_path: Path, changes: dict[str, Any]) -> None:
    root = tmp_path / "runs"
    folder = runs.create(root, "r1")
    folder.config.write_bytes(msgspec.json.encode(Config(engine=Engine(kind="sglang", exact=False, options=changes))))
    with pytest.raises(RunError, match=f"run r1 has engine.options.{next(iter(changes))}"):
        open_run(Config(run=Run(dir=str(root))), policy_of("r1"), Stopping(), None)  # type: ignore[arg-type]
    assert not (folder.path / "config-eval.json").exists()


async def _keep(folder: Path) -> None:
    async with (
        Server(folder / "broker") as server,
        await as_writers(server.url, server.credentials) as admin,
    ):
        await declare(admin)


def test_a_recorded_runs_reward_is_imported_where_the_command_line_names_it(
    tmp_path: Path, marked: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / RUN
    uvloop.run(_keep(folder))
    settings = Config(
        environment=Environment(backend="process", warm=0),
        algorithm=Algorithm(reward="marked:reward"),
        tasks=Tasks(suite="marked:suite/x"),
        evaluation=Evaluation(every_suites=("marked:suite/x",)),
        run=Run(plugins={"rewards": ("marked:reward",)}),
    )
    (folder / "config.json").write_bytes(msgspec.json.encode(settings))
    command = ("rejudge", str(folder), "--judge", "j2", "--recorded")
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == "" and "'marked:reward'" in said.err and "--plugin rewards=" in said.err
    assert not marked()
    assert main((*command, "--plugin", "rewards=marked:reward")) == 1, "it has no groups"
    assert marked()
