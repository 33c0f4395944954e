"""A person's own files through a whole run: a checkpoint, conversations as JSONL, and tasks as JSONL.

Mid-training reads the conversations in the checkpoint's own chat format, reinforcement learning follows, and
`headrace export` writes a folder that transformers loads.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.policy.layout import checkpoint
from headrace.rendering import schemas
from tests.launch.test_up import FEW, HEADRACE, command, up
from tests.policy.test_families import QWEN, theirs
from tests.support import chat_formats
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

REPAIRS = """\
def parity(judged):
    ids = [id for turn in judged.trajectory.turns for id in turn.ids.tolist()]
    return float(sum(id % 2 for id in ids)) / len(ids)
"""
"""Reward of the repairs: a random model solves none, and this differs within every group."""
COIN, COLOUR = "Toss a coin", "Name a colour"
GROUP, STEPS = 128, 4


def model(folder: Path) -> str:
    """A folder as transformers saves one, with the chat template of the tests' Hermes format."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(chat_formats.tokenizer_json(), encoding="utf-8")
    settings = {"eos_token": "<|im_end|>", "chat_template": chat_formats.TEMPLATES["hermes"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    changes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "initializer_range": 0.02}
    theirs("qwen3", QWEN | changes).save_pretrained(folder)
    return str(folder)


def configuration(folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    """The pretrained demo's recipe with a chat file as its only data."""
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    recipe = (ROOT / "deploy" / "demo-pretrained.toml").read_text(encoding="utf-8")
    data = f'[[mid_training.data]]\nkind = "chat"\npath = "{folder / "chat.jsonl"}"\n'
    (folder / "mine.toml").write_text(f"{recipe}\n{data}", encoding="utf-8")
    return str(folder / "mine.toml")


def repair(number: int) -> dict[str, Any]:
    """A conversation with tools: search, edit, finish."""
    path = f"kit/part{number % 7}.py"
    turns = [
        ("search", {"query": f"def f{number}"}, f"{path}:1: def f{number}(): return {number + 1}"),
        ("edit_file", {"path": path, "lines": "1", "text": f"def f{number}(): return {number}"}, "edited"),
        ("finish", {"message": "done"}, "ok"),
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix Python functions."},
        {"role": "user", "content": f"f{number}() should return {number}"},
    ]
    for name, arguments, result in turns:
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": name, "content": result})
    messages.append({"role": "assistant", "content": "It is fixed."})
    return {"messages": messages, "tools": [schemas.BY_NAME[name].function() for name, _, _ in turns]}


def answer(question: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}


def exported(folder: Path, *words: str) -> Any:
    """The model that transformers loads from an export, whose tokenizer has the chat template."""
    done = command(folder, "export", "latest", "out", *words)
    assert done.returncode == 0, done.stderr
    assert transformers.AutoTokenizer.from_pretrained(folder / "out").chat_template
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
    return loaded.eval()


@pytest.mark.timeout(1200)
async def test_conversations_with_tools_then_three_steps_in_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reward.py").write_text(REPAIRS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = FEW | {
        "policy.checkpoint": model(tmp_path / "model"),
        "weights.precision": "as_trained",
        "mid_training.tokens": 30_000,
        "mid_training.batch_tokens": 600,
        "mid_training.learning_rate": 3e-3,
        "mid_training.schedule": "cosine",
        "mid_training.held_out": 0.2,
        "curriculum.steps": 3,
        "curriculum.group_size": 4,
        "curriculum.groups_per_step": 2,
        "limits.max_turns": 2,
        "limits.context_tokens": 4096,
        "algorithm.reward": "own_reward:parity",
        "trainer.frozen": [],
    }
    words = configuration(tmp_path, [repair(number) for number in range(24)])
    async with up(tmp_path, *HEADRACE, "up", words, **settings) as run:
        code, said = await run.end(1000.0)
    assert code == 0, said
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["steps"] == 3 and report["failed_steps"] == 0
    assert report["rescored_tokens"] > 0 and report["max_abs_dlp"] == 0.0
    losses = report["held_out_loss"]["0:chat"]
    assert losses["after"] < 0.7 * losses["before"], "mid-training learned nothing from the file"
    before = checkpoint.load(tmp_path / "model")[1]
    after = exported(tmp_path).state_dict()
    moved = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert len(moved) > len(before) // 2


@pytest.mark.timeout(1200)
async def test_answers_then_groups_of_128_with_a_checker_and_no_sandbox(tmp_path: Path) -> None:
    rng = random.Random(1)
    lines = [answer(f"{COIN} {n}", rng.choice(("heads", "tails"))) for n in range(60)]
    lines += [answer(f"{COLOUR} {n}", "red") for n in range(60)]
    # The policy has half of the tosses right, and no colour: a group of the latter has equal rewards.
    for name, numbers in (("mine", range(60)), ("later", range(60, 72))):
        rows = [{"id": f"c{n}", "prompt": f"{COIN} {n}", "answer": "heads"} for n in numbers]
        if name == "mine":
            rows += [{"id": f"r{n}", "prompt": f"{COLOUR} {n}", "answer": "xs"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = command(tmp_path, "tasks", "import", "jsonl", f"{name}.jsonl")
        assert done.returncode == 0, done.stderr
    settings = FEW | {
        "policy.checkpoint": model(tmp_path / "model"),
        "weights.precision": "as_trained",
        "mid_training.tokens": 24_000,
        "mid_training.batch_tokens": 256,
        "mid_training.learning_rate": 3e-3,
        "mid_training.held_out": 0.2,
        "tasks.suite": "mine",
        "tasks.heldout": "later",
        "tasks.uncertified": True,
        "curriculum.steps": STEPS,
        "curriculum.group_size": GROUP,
        "curriculum.groups_per_step": 1,
        "curriculum.replace_flat": 1,
        "limits.max_turns": 1,
        "limits.max_turn_tokens": 8,
        "limits.max_tokens": 8,
        "limits.context_tokens": 512,
        "algorithm.learning_rate": 1e-3,
        "algorithm.weighting": "clipped",
        "algorithm.ratio_high": 1.28,
        "algorithm.minibatches": 2,
        "algorithm.kl": "k3",
        "algorithm.kl_weight": 0.01,
        "algorithm.constant_tokens": 0,
        "trainer.frozen": [],
        "evaluation.every": 1,
        "evaluation.every_suites": ["later"],
        "evaluation.every_tasks": 12,
    }
    async with up(tmp_path, *HEADRACE, "up", configuration(tmp_path, lines), **settings) as run:
        code, said = await run.end(1000.0)
    assert code == 0, said
    report = json.loads((run.run / "report.json").read_text())
    ledger = report["ledger"]
    assert ledger["balanced"] and report["steps"] == STEPS and report["failed_steps"] == 0
    assert report["rescored_tokens"] > 0 and report["max_abs_dlp"] == 0.0
    assert ledger["trained"] == STEPS * GROUP
    assert ledger["dropped"]["flat"] in range(GROUP, (STEPS + 1) * GROUP + 1, GROUP), "dynamic sampling"
    rates = [point["rate"] for point in report["curve"] if point["suite"] == "later"]
    assert rates and sum(rates) / len(rates) > 0.2, "before mid-training no answer was a word"
    exported(tmp_path, "--version", "2")
