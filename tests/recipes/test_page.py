"""The commands of docs/gpu.md in order, with the hardware simulated and a small model in the published one's place."""

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import load
from headrace.policy.layout import checkpoint, hugging_face
from headrace.training.figures.duration import AttemptTokens
from headrace.training.figures.gpu_duration import Stated, predict
from tests.recipes.test_init import RECIPES, Machine, simulate
from tests.support import chat_formats, model_folders, tiny
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "gpu.md"
NEED_A_RUN = {"up", "eval", "export"}
"""Commands of the page that other tests run (tests/launch/test_up.py)."""


def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models" / "Qwen3-4B-Instruct-2507"
    config = tiny.config(vocab=600)
    checkpoint.save(model, tiny.model(config), config)
    (model / "tokenizer.json").write_text(chat_formats.tokenizer_json())
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (model / "chat_template.jinja").write_text(chat_formats.CHATML)
    simulate(monkeypatch, Machine(1))
    lines = [shlex.split(line) for line in re.findall(r"^    headrace (.*)$", PAGE.read_text(), re.MULTILINE)]
    assert [words[0] for words in lines if words[0] not in NEED_A_RUN] == [
        "init", "check", "trainer", "check", "check", "try", "estimate",
    ]  # fmt: skip
    for words in lines:
        if words[0] in NEED_A_RUN:
            continue
        if words[0] == "try":  # it computes, and this machine has no GPU
            small = ("limits.max_turn_tokens=8", "limits.reserve_tokens=0", "environment.backend=process")
            here = ("trainer.device=cpu", "engine.device=cpu", *small)
            words += [word for each in here for word in ("--set", each)]
        assert main(words) == 0, (words, capsys.readouterr())
    shown = capsys.readouterr().out
    assert "bound by" in shown and "GPU-hours" in shown
    assert len(PAGE.read_text().splitlines()) <= 150


def test_every_recipe_is_in_the_pages_table() -> None:
    assert [each.stem for each in RECIPES if f"`{each.stem}`" not in PAGE.read_text()] == []


def test_a_step_on_gpus_is_the_operations_over_the_stated_speeds() -> None:
    """Against arithmetic of its own: 8.2 billion parameters, 6 operations a parameter and token and 12 a pair."""
    config = load(ROOT / "deploy" / "gpu" / "8x80-qwen3-8b.toml")
    policy = hugging_face.parse(model_folders.CONFIGS["Qwen3-8B"])
    attempt, stated = AttemptTokens(20_000, 10_000), Stated(990e12, 0.2, 1000.0)
    step = predict(config, policy, attempt, stated)
    pairs = 30_000**2 / 2
    # Without the embedding, and the head for sampled tokens alone.
    forward = 2 * 6.95e9 * 30_000 + 4 * 36 * 4096 * pairs + 2 * 0.62e9 * 10_000
    passes = 4 if config.numerics.recompute else 3
    assert step.training == pytest.approx(128 * passes * forward / (990e12 * 0.2 * 4), rel=0.02)
    assert step.rescoring == pytest.approx(8 * forward / (990e12 * 0.2), rel=0.02)
    decoding = 128 * 10_000 / (1000.0 * 4)
    assert decoding < step.sampling < 1.5 * decoding
    assert step.gpus == 8 and step.seconds == step.training + step.rescoring and step.bound == "training"
    faster = predict(config, policy, attempt, stated._replace(mfu=0.4))
    assert faster.training == step.training / 2
    slower = predict(config, policy, attempt, stated._replace(tokens=10.0))
    assert slower.bound == "sampling" and slower.seconds == slower.sampling
