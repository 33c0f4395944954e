"""A whole run that trains adapters alone, by rewards of turns: exact, and out again merged and as a PEFT folder."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from headrace.policy.adapters import low_rank, shape
from headrace.policy.adapters import peft as peft_folder
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.weights import tensor_state
from tests.launch.test_model_families import FAMILIES, made
from tests.launch.test_up import FEW, HEADRACE, command, up
from tests.policy.test_families import theirs
from tests.support import tiny
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

REWARD = """\
from headrace.messages.judging import TurnRewards

def parity(judged):
    shares = [sum(id % 2 for id in turn.ids.tolist()) / max(1, len(turn.ids)) for turn in judged.trajectory.turns]
    return TurnRewards(final=shares[-1], turns=tuple(shares))
"""


@pytest.mark.timeout(1800)
async def test_three_steps_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    made("llama", folder)
    (tmp_path / "own_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    texts = str(tmp_path / "texts.jsonl")
    lines = [json.dumps({"text": f"def f{number}(): return {number}"}) for number in range(60)]
    Path(texts).write_text("\n".join(lines))
    recipe = (ROOT / "deploy" / "demo-pretrained.toml").read_text(encoding="utf-8")
    (tmp_path / "own.toml").write_text(f'{recipe}\n[[mid_training.data]]\nkind = "text"\npath = "{texts}"\n')
    settings = FEW | {
        "policy.checkpoint": str(folder),
        "weights.precision": "as_trained",
        "mid_training.tokens": 3000,
        "mid_training.batch_tokens": 500,
        "mid_training.held_out": 0.3,
        "curriculum.steps": 3,
        "curriculum.group_size": 2,
        "curriculum.groups_per_step": 1,
        "limits.max_turns": 2,
        "limits.context_tokens": 4096,
        "algorithm.reward": "own_reward:parity",
        "trainer.frozen": [],
        "trainer.lora.rank": 4,
        "evaluation.every": 2,
        "evaluation.every_tasks": 1,
    }
    async with up(tmp_path, *HEADRACE, "up", str(tmp_path / "own.toml"), **settings) as run:
        code, said = await run.end(1500.0)
    assert code == 0, said
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["steps"] == 3 and report["failed_steps"] == 0
    assert report["rescored_tokens"] > 0 and report["max_abs_dlp"] == 0.0
    assert len(report["turn_rewards"]) == 3 and all(0.0 < mean < 1.0 for mean in report["turn_rewards"])
    losses = report["held_out_loss"]["0:text"]
    assert losses["after"] < losses["before"], "mid-training of the adapters alone learned nothing"

    done = command(tmp_path, "replay", "latest", "--step", "2")
    assert done.returncode == 0 and json.loads(done.stdout)["bitwise_equal"], done.stderr

    (trained,) = (run.run / "snapshots").glob("v00000003-*.safetensors")
    config, before = checkpoint.load(folder)
    tensors = tensor_state.read(trained)
    moved = {name for name, tensor in tensors.items() if name not in before or not torch.equal(tensor, before[name])}
    assert moved == {name for name in tensors if low_rank.is_published(name)}

    adapted = hugging_face.read(run.run / "checkpoints" / "policy")
    assert adapted.adapter is not None and moved and adapted.adapter.rank == 4
    mine = Model(adapted, tiny.numerics(adapted), seed=None)
    mine.load_state(tensors)
    ids = tiny.tokens(config, 150)
    with torch.no_grad():
        want = mine.logits(mine(ids, [len(ids)]))
    for target, more in (("out", ()), ("adapter", ("--as", "adapter"))):
        done = command(tmp_path, "export", "latest", target, *more)
        assert done.returncode == 0, done.stderr
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids[None]).logits[0], want, rtol=0, atol=1e-4)
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert 4 * shape.parameters(adapted) < size < 4 * shape.parameters(adapted) + 20_000


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by PEFT
async def test_peft_computes_what_the_policy_computes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed; names and sizes of its folder are tested")
    for kind in ("llama", "qwen3", "deepseek_v3"):
        fields = FAMILIES[kind][1] | {"vocab_size": 300}
        theirs(kind, fields).save_pretrained(tmp_path / kind)
        plain, before = checkpoint.load(tmp_path / kind)
        config = msgspec.structs.replace(plain, adapter=shape.resolved(plain, 4, 8.0, ()))
        model = tiny.model(config, exact=False)
        model.load_state({**model.state(), **before})
        for name, parameter in model.named_parameters():
            if low_rank.is_adapter(name):
                torch.nn.init.normal_(parameter, std=0.1)
        written = peft_folder.export(config, model.state(), str(tmp_path / kind), "", tmp_path / f"{kind}-adapter")
        assert written == 4 * shape.parameters(config)
        ids = tiny.tokens(config, 100)
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
        with torch.no_grad():
            want = model.logits(model(ids, [100]))
            got = peft.PeftModel.from_pretrained(base, tmp_path / f"{kind}-adapter").eval()(ids[None]).logits[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
