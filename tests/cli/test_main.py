"""The command line: one sentence and an exit code for every error."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import MODULES, main, parser
from tests.support.paths import ROOT

DEMO = str(ROOT / "deploy" / "demo.toml")
CACHE = f"environment.cache_dir={json.dumps(str(ROOT / '.cache' / 'headrace'))}"
"""It has the base image, without which `vm build` makes one first: 19 s of processor time."""
JOIN = ("trainer", "join", DEMO)
TWO_NODES = tuple(
    word for key in ("mesh.shard=2", "node_ranks=1", "rendezvous=127.0.0.1:1") for word in ("--set", f"trainer.{key}")
)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("up", "none.toml"), 2, "no such file"),
        (("audit", "r19990101-000000-s1"), 2, "there is no run"),
        (("top",), 2, "needs a terminal"),
        (("actor", "nobody", "--config", DEMO, "--run", "r1", "--url", "x"), 2, "unknown"),
        (("actor", "judge", "--config", DEMO), 2, "needs a run"),
        (("eval", "--policy", "scripted:genius", "--suite", "generated/heldout"), 2, "oracle, idle or edit-tests"),
        (("eval", "--policy", "scripted:idle", "--suite", "nowhere"), 2, "nowhere"),
        (("eval", "--policy", "scripted:idle", "--trials", "0"), 2, "expected an integer >= 1"),
        (("chaos", DEMO, "--kills", "0"), 2, "--kills"),
        (("bus", "declare"), 4, "expected a broker"),
        (("estimate", DEMO, "--set", "engine.kind=sglang"), 2, "headrace estimate measures CPUs"),
        (("estimate", DEMO, "--set", "trainer.device=cuda", "--gpu", "none"), 2, "set [trainer] peak_tflops"),
        (("estimate", DEMO, "--set", "policy.checkpoint=."), 2, "config.json"),
        (JOIN, 2, "trainer.node_ranks: expected fewer"),
        ((*JOIN, *TWO_NODES), 2, "--node N, or one of NODE_RANK, GROUP_RANK, SLURM_NODEID"),
        (("images", "nowhere.tar"), 3, "nowhere.tar can't be imported: there is no such file"),
        (("images", "/dev/zero"), 3, "/dev/zero can't be imported: it is neither a file nor a folder"),
        (("vm", "gc", "--forget", "nobody"), 3, "there is no image 'nobody'"),
        (("vm", "build", "nobody", "--set", CACHE), 3, "there is no template 'nobody'; known are light, debian"),
        (("vm", "run", "--template", "light"), 3, "light has no command of its own"),
        (("vm", "run", "--template", "nobody", "--", "true"), 3, "there is no template 'nobody'"),
        (("vm", "run", "--push", "nowhere", "--", "true"), 3, "nowhere cannot be read: No such file or directory"),
        (("vm", "run", "--template", "a/../b", "--", "true"), 3, "there is no template 'a/../b'"),
        (("vm", "run", "--env", "NAME", "--", "true"), 2, "expected NAME=VALUE, got 'NAME'"),
        (("vm", "run", "--timeout", "nan", "--", "true"), 2, "expected a number > 0, got 'nan'"),
    ],
)
def test_mistakes_end_in_one_sentence(
    args: tuple[str, ...],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace.cli.vm.end_together", lambda: None)
    for name in ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
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


def test_a_reader_that_leaves_is_one_sentence(tmp_path: Path) -> None:
    """`headrace ... | head -1`: the arguments' own texts are longer than a pipe holds only for the completions."""
    line = f"{sys.executable} -m headrace.cli --completion bash | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout in ("0\n", "3\n") and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [("headrace che", "check"), ("headrace tasks cer", "certify"), ("headrace check --exp", "--explain")],
)
def test_bash_completes_commands_and_options(words: str, offered: str, tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    with script.open("w") as file:
        subprocess.run([sys.executable, "-m", "headrace.cli", "--completion", "bash"], stdout=file, check=True)
    count = len(words.split())
    typed = f"COMP_WORDS=({words}); COMP_CWORD={count - 1}"
    line = f"source {script}; {typed}; _shtab_headrace headrace; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [offered], done.stderr


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


def test_headrace_alone_shows_commands_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1:] for line in lines if line.startswith("  headrace ")]
    assert len(shown) == 8 and len(lines) <= 24 and max(map(len, lines)) <= 80
    for words in shown:
        assert parser().parse_args(words).command == words[0]
