"""Defaults pass their own check and protect a checkpoint; so does every snippet of the docs; what would ruin it is
refused."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.config import load
from headrace.policy.layout import hugging_face
from tests.support import alone, model_folders, tiny
from tests.support.paths import ROOT
from tests.test_snippets import fenced

PROCESS = ("environment.backend=process", "run.min_free_mb=16")
"""A machine need not have QEMU."""
SMALL = hugging_face.as_json(tiny.config(vocab=600))


def check(capsys: pytest.CaptureFixture[str], *words: str, sets: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """The exit code, and the parts of the problems."""
    code = main(["check", *words, *(word for each in (*PROCESS, *sets) for word in ("--set", each))])
    out = capsys.readouterr()
    lines = [line for line in (out.out + out.err).splitlines() if not line.startswith("ok ")]
    return code, lines


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_bare_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys) == (0, [])


def test_a_demo_is_checked_without_torch() -> None:
    """A plan is measured only where a bound in closed form does not fit."""
    code = (
        "import sys; from headrace.cli.main import main\n"
        f"code = main(['check', {str(ROOT / 'deploy' / 'demo.toml')!r}, '--set', 'environment.backend=process'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "ok   trainer: it needs less than" in done.stdout, done.stdout + done.stderr


CONFIGURATIONS = [each for each in fenced("toml") if not each.text.startswith(("name =", "[project"))]


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)), ids=[snippet.where for snippet in CONFIGURATIONS])
def test_every_snippet_of_the_docs_passes(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the files that the pages name, and without the servers and GPUs of the reader's machine."""
    text = CONFIGURATIONS[number].text
    for name in ("mine", "Qwen3-4B"):
        model_folders.folder(tmp_path / "models", name, SMALL | {"max_position_embeddings": 262144})
    (tmp_path / "my_checkers.py").touch()
    (tmp_path / "run.toml").write_text(text)
    code, problems = check(capsys, "run.toml", sets=("evaluation.heldout_tasks=0", "evaluation.unseen_tasks=0"))
    of_servers = ("BAD  engine.options.python:", "BAD  engine.options.server_devices:")
    others = [each for each in problems if not each.startswith(of_servers)]
    assert not others and code == int(bool(problems))


def test_a_checkpoint_gets_a_small_rate_no_mid_training_and_the_limits_of_its_positions(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[policy]\ncheckpoint = "model"\n')
    for positions, context, turn in ((262144, 32768, 4096), (8192, 6144, 1024), (40960, 32768, 4096)):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL | {"max_position_embeddings": positions}))
        config = load("run.toml")
        assert (config.mid_training.tokens, config.algorithm.learning_rate) == (0, 1e-6)
        limits = config.limits
        assert (limits.context_tokens, limits.max_turn_tokens, limits.max_turns) == (context, turn, 50)
        assert limits.context_tokens + 2 * limits.max_turn_tokens <= positions
    (tmp_path / "own.toml").write_text(
        '[policy]\ncheckpoint = "model"\n[mid_training]\ntokens = 7\n[limits]\ncontext_tokens = 2048\n'
        "[algorithm]\nlearning_rate = 2e-6\n"
    )
    own = load("own.toml")
    assert (own.mid_training.tokens, own.algorithm.learning_rate) == (7, 2e-6)
    assert (own.limits.context_tokens, own.limits.max_turn_tokens, own.limits.max_tokens) == (2048, 512, 1024)
    assert load("").algorithm.learning_rate == 1e-3, "a new policy keeps its own"
    recorded = tmp_path / "recorded.json"
    recorded.write_bytes(msgspec.json.encode({"policy": {"checkpoint": "model"}, "algorithm": {"learning_rate": 0.5}}))
    assert load(recorded).algorithm.learning_rate == 0.5


RUINOUS = {
    "algorithm.learning_rate": ["algorithm.learning_rate=1e-3"],
    "mid_training.learning_rate": ["mid_training.tokens=3000000"],
    "feedback.learning_rate": ["feedback.enabled=true", "feedback.learning_rate=1e-3"],
    "limits.context_tokens": ["limits.context_tokens=41000"],
    "production.limits.context_tokens": ["production.limits.context_tokens=50000"],
    "mid_training.sequence": [
        "mid_training.tokens=1000",
        "mid_training.learning_rate=1e-6",
        "mid_training.sequence=65536",
        'mid_training.data=[{kind = "text", path = "x"}]',
    ],
}


@pytest.mark.parametrize("key", RUINOUS)
def test_what_would_ruin_a_checkpoint_is_refused_unless_a_key_says_so(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = SMALL | {"max_position_embeddings": 40960, "hidden_size": 2048}
    sets = (f"policy.checkpoint={model_folders.folder(tmp_path, 'm', shape)}", *RUINOUS[key], "tasks.uncertified=true")
    sets += tuple(f"{name}={suite}" for name, suite in alone.SUITES.items())
    code, problems = check(capsys, sets=sets)
    assert code == 1 and [line.split(":")[0] for line in problems] == [f"BAD  {key}"], problems
    assert "policy.unprotected = true" in problems[0]
    assert check(capsys, sets=(*sets, "policy.unprotected=true")) == (0, [])
