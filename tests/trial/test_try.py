"""`headrace try` takes a small model through every part, and ends with the key to change where one does not work."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli.main import main
from headrace.policy.layout import checkpoint
from tests.recipes.test_init import sglang
from tests.support import chat_formats, tiny

GOOD: dict[str, Any] = {
    "policy.checkpoint": "model",
    "environment.backend": "process",
    "run.min_free_mb": 16,
    "production.enabled": False,
    "trainer.device": "cpu",
    "engine.device": "cpu",
    "limits.max_turn_tokens": 8,
    "limits.max_tokens": 64,
    "limits.context_tokens": 16_000,
    "curriculum.steps": 1,
    "algorithm.learning_rate": 1e-4,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the weights of a small model."""
    monkeypatch.chdir(tmp_path)
    config = tiny.config(vocab=600)
    folder = tmp_path / "model"
    checkpoint.save(folder, tiny.model(config), config)
    (folder / "tokenizer.json").write_text(chat_formats.tokenizer_json())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(chat_formats.CHATML)
    (tmp_path / "run.toml").write_text("")
    return folder


def attempt(capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, str]:
    keys = GOOD | {key.replace("__", "."): value for key, value in changes.items()}
    code = main(
        ["try", "run.toml", *(w for key, value in keys.items() for w in ("--set", f"{key}={json.dumps(value)}"))]
    )
    out = capsys.readouterr()
    return code, out.out + out.err


def test_every_part_is_tried_with_its_seconds(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = attempt(capsys)
    assert code == 0, shown
    names = [match[1] for match in re.finditer(r"^ok +[\d.]+ s  ([^:]+): .+$", shown, re.MULTILINE)]
    versions = [
        name
        for version in (0, 1)
        for name in (
            f"version {version} to the engine",
            f"sample with version {version}",
            f"score again and step to version {version + 1}",
        )
    ]
    assert names == ["render", "trainer loads", "engine starts", *versions, "sandbox light"]
    differences = re.findall(r"largest difference (\S+) nats over (\d+) tokens, gradient (\S+);", shown)
    assert [float(each) for each, _, _ in differences] == [0.0, 0.0], "exact mode"
    assert all(int(tokens) > 4 and float(gradient) > 0.0 for _, tokens, gradient in differences)
    assert re.search(r"stops at \d+ '<\|im_end\|>'", shown) and not list(Path("runs").iterdir())


def as_it_is(folder: Path) -> None:
    """Only the configuration has a fault."""


def broken(folder: Path) -> None:
    """A weight that no training leaves."""
    config, tensors = checkpoint.load(folder)
    tensors["model.norm.weight"].fill_(torch.nan)
    checkpoint.save(folder, tensors, config)


def without_a_server(folder: Path) -> None:
    """An interpreter that says it has SGLang, and has none to start."""
    sglang(folder.parent)


FAULTS: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "a context without a turn": (as_it_is, {"limits__context_tokens": 200}, "limits.context_tokens: "),
    "weights that are no numbers": (broken, {}, "engine: "),
    "a version that is not loaded": (
        as_it_is,
        {"engine__kind": "tests.support.stale_engine:stale"},
        "engine.exact = true, and sampler and trainer differ by ",
    ),
    "the same outside of exact mode": (
        as_it_is,
        {"engine__kind": "tests.support.stale_engine:stale", "engine__exact": False, "algorithm__learning_rate": 5e-2,
         "policy__unprotected": True},
        "engine.kind = 'tests.support.stale_engine:stale': ",
    ),
    "a server that ends": (
        without_a_server,
        {"engine__kind": "sglang", "engine__exact": False, "engine__device": "auto",
         "engine__options__python": "./python", "engine__options__args": ["--device", "cpu"]},
        "engine.weights: version 0 is not served: ",
    ),
    "a fault that check finds": (as_it_is, {"tasks__suite": "nowhere"}, "BAD  tasks.suite: "),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_ends_it_with_the_key(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed, changes, key = FAULTS[name]
    seed(model)
    code, shown = attempt(capsys, **changes)
    assert code == 1 and key in shown, shown
