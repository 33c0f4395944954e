"""The command line: one sentence and an exit code for every error."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import MODULES, main, parser
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["up", "none.toml"], 2, "no such file"),
        (["audit", "r19990101-000000-s1"], 2, "there is no run"),
        (["actor", "nobody", "--config", str(ROOT / "deploy/demo.toml"), "--run", "r1", "--url", "x"], 2, "unknown"),
        (["actor", "judge", "--config", str(ROOT / "deploy/demo.toml")], 2, "needs a run"),
        (["eval", "--policy", "scripted:genius", "--suite", "generated/heldout"], 2, "no scripted policy"),
        (["eval", "--policy", "scripted:idle", "--suite", "nowhere"], 2, "nowhere"),
    ],
)
def test_mistakes_end_in_one_sentence(
    args: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args) == code
    said = capsys.readouterr().err
    assert says in said and said.startswith("headrace: ") and said.count("\n") == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"headrace {headrace.__version__}\n"


def test_every_command_has_help() -> None:
    top = parser()
    names = [[name] for name in subcommands(top)]
    names += [[name, inner] for name, group in subcommands(top).items() for inner in subcommands(group)]
    assert len(names) > 3 * len(MODULES)
    for words in names:
        with pytest.raises(SystemExit) as ended:
            top.parse_args([*words, "--help"])
        assert ended.value.code == 0


def subcommands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    actions = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def test_a_broker_that_is_down_is_one_sentence_also_with_closed_streams(tmp_path: Path) -> None:
    """uvloop aborts where a socket of its own gets the number of a stream."""
    actor = f"actor curriculum --config {ROOT / 'deploy/demo.toml'} --run r1 --url nats://127.0.0.1:1"
    line = f"exec {sys.executable} -m headrace.cli {actor} <&- >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 4 and "127.0.0.1:1" in done.stderr, done.stderr
    assert done.stderr.startswith("headrace: ") or "headrace: " in done.stderr, done.stderr


def leaves(commands: argparse.ArgumentParser) -> list[str]:
    """The commands without subcommands, each with its group before it."""
    names: list[str] = []
    for action in commands._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                names += [f"{name} {each}" for each in leaves(below)] or [name]
    return names


def test_the_commands_fit_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(parser().format_help().splitlines()) <= 45 and len(leaves(parser())) <= 55
