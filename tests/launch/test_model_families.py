"""Whole runs of tiny models of each architecture, with the tokenizers that such models really have.

A folder as transformers saves it goes in; every actor takes part in three steps; what `headrace export` writes is what
transformers computes the trainer's logits from.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.policy.layout import hugging_face
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build
from headrace.weights import tensor_state
from tests.launch.test_up import FEW, HEADRACE, command, up
from tests.policy.test_families import DEEPSEEK, GLM, QWEN, theirs
from tests.support import chat_formats, chat_packages, model_types, tiny
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

DEEPSEEK_CHAT = """\
{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- else %}{{ '<｜Assistant｜>' + m.content }}
{%- for call in m.tool_calls or [] %}{% if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}{{ call.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}{% if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
"""DeepSeek-V3.1's frames and calls, which its tokenizer has tokens for."""

FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "qwen3": ("qwen3", QWEN, "", "hermes"),
    "llama": (
        "llama3_1",
        {name: value for name, value in QWEN.items() if name != "head_dim"},
        chat_formats.TEMPLATES["llama3"],
        "llama3",
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK, DEEPSEEK_CHAT, "deepseek"),
    "gpt_oss": ("gptoss", {}, "openai-gpt-oss-120b", "harmony"),
    "mistral": ("mistral_nemo", QWEN | {"sliding_window": None}, "", "mistral"),
    "glm4_moe": ("", GLM, "GLM-4.6", "glm"),
    "qwen3_5_text": ("qwen3", {}, "", "hermes"),
}
"""Architecture to its tokenizer's package (empty: the tests' own, with the template's tokens), its shape, its chat
template (empty: the package's; or the name of a published one), its syntax."""
MID_TRAINED = {"mid_training.tokens": 3000, "mid_training.batch_tokens": 500}
LIBRARY: dict[str, dict[str, Any]] = {"gpt_oss": {}, "qwen3_5_text": MID_TRAINED}
"""Those of the provider transformers, with settings of their runs."""

REWARD = """\
def parity(judged):
    ids = [id for turn in judged.trajectory.turns for id in turn.ids.tolist()]
    return float(sum(id % 2 for id in ids)) / len(ids)
"""
"""Random weights solve no task; this reward differs within every group, so every step changes the weights."""


def made(kind: str, folder: Path) -> None:
    """A folder as transformers saves one: weights, configuration, tokenizer, chat template."""
    package, fields, template, _ = FAMILIES[kind]
    template = chat_packages.templates().get(template, template)
    settings: dict[str, Any] = {"eos_token": "<|endoftext|>"}
    if package:
        source = chat_packages.tokenizer(package)
        shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
        settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    else:
        (folder / "tokenizer.json").write_text(chat_formats.tokenizer_for(template), encoding="utf-8")
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    vocab = len(tokenizer)
    sizes = {"vocab_size": vocab, "max_position_embeddings": 4096}
    if kind in LIBRARY:
        model_types.folder(folder, kind, vocab_size=vocab, max_position_embeddings=4096)
    else:
        theirs(kind, fields | sizes).save_pretrained(folder)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", FAMILIES)
async def test_three_steps_and_out_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, exact = tmp_path / "model", kind not in LIBRARY
    folder.mkdir()
    made(kind, folder)
    (tmp_path / "own_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = FEW | {
        "policy.checkpoint": str(folder),
        "policy.provider": "auto",
        "engine.exact": exact,
        "weights.precision": "as_trained",
        "mid_training.tokens": 0,
        "curriculum.steps": 3,
        "curriculum.group_size": 2,
        "curriculum.groups_per_step": 1,
        "limits.max_turns": 2,
        "limits.context_tokens": 4096,
        "algorithm.reward": "own_reward:parity",
        "trainer.frozen": [],
        "trainer.device": "cpu",
        "evaluation.every": 2,
        "evaluation.every_tasks": 1,
        **LIBRARY.get(kind, {}),
    }
    async with up(tmp_path, *HEADRACE, "up", str(ROOT / "deploy" / "demo-pretrained.toml"), **settings) as run:
        code, said = await run.end(1500.0)
    assert code == 0, said
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["steps"] == 3 and report["failed_steps"] == 0
    assert report["rescored_tokens"] > 0 and report["max_abs_dlp"] <= (0.0 if exact else 1e-4)
    assert [point["suite"] for point in report["curve"]] == ["generated/heldout"]
    assert report["curve"][0]["version"] >= 2
    bundle = json.loads((run.run / "renderer.json").read_text())
    assert bundle["renderer"] == FAMILIES[kind][3]

    done = command(tmp_path, "export", "latest", "out")
    assert done.returncode == 0, done.stderr
    (trained,) = (run.run / "snapshots").glob("v00000003-*.safetensors")
    config = hugging_face.read(folder)
    mine = build(config, tiny.numerics(config) if exact else Numerics(exact=False, reason="", fingerprint=""))
    mine.load(folder)
    before = {name: tensor.clone() for name, tensor in mine.state().items()}
    mine.load_state(tensor_state.read(trained))
    moved = [name for name, tensor in mine.state().items() if not torch.equal(tensor, before[name])]
    assert len(moved) > len(before) // 2
    ids = tiny.tokens(config, 150)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        want = mine.logits(mine(ids, [len(ids)]))
        torch.testing.assert_close(loaded.eval()(ids[None]).logits[0], want, rtol=0, atol=1e-4)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
