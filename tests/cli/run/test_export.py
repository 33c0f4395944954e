"""`headrace export`: what transformers computes from the folder is what the policy computes, for every architecture."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import decoders
from torch import Tensor

from headrace.bus.broker import credentials, keys
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.bus.payloads import renderer_bundles
from headrace.cli.main import main
from headrace.config import Config, MidTraining, Policy
from headrace.config import Run as RunSection
from headrace.config.training import Lora, Trainer
from headrace.launch import runs
from headrace.messages.rollout import RendererBundle
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from headrace.policy.seam import PolicyModel
from headrace.rendering import schemas
from headrace.rendering.bundle import terse_bundle
from headrace.rendering.tokenizer import Tokenizer
from headrace.training.trainer import PolicyTrainer
from headrace.weights import tensor_state
from headrace.weights.publishing import precision, release
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.snapshot import Snapshot
from tests.policy.gguf.test_convert import original
from tests.policy.test_families import DEEPSEEK, QWEN, theirs
from tests.support import tiny
from tests.support.chat_formats import CHATML
from tests.support.keys import as_writers
from tests.support.object_folder import ObjectFolder

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN | {"vocab_size": 300},
    "llama": {name: value for name, value in QWEN.items() if name != "head_dim"} | {"vocab_size": 300},
    "deepseek_v3": DEEPSEEK | {"vocab_size": 300},
}


def start(root: Path, config: Config) -> PolicyTrainer:
    """A run's folder with its configuration and its trainer's folder."""
    folder = runs.create(root / "runs", "r1")
    folder.config.write_bytes(json.dumps({"policy": {"checkpoint": config.policy.checkpoint}}).encode())
    text = (Path(config.policy.checkpoint or root) / "tokenizer.json").read_text()
    return PolicyTrainer.prepare(config, folder.path / "checkpoints", tokenizer_json=text, traces=tuple)


async def publish(root: Path, versions: list[dict[str, Tensor]], bundle: RendererBundle) -> None:
    """Publish version 0, 1, ... and the bundle into the run's own store; the broker is down afterwards."""
    folder = runs.find("r1", root / "runs")
    async with Server(folder.broker) as server:
        async with await as_writers(server.url, server.credentials) as admin:
            await declare(admin)
        async with await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus:
            await renderer_bundles.publish(bus, "r1", bundle)
        key = keys.load(server.credentials, credentials.PUBLISHER)
        async with await Bus.connect(server.url, role="weight_sync", credentials=server.credentials) as bus:
            commit, base = None, None
            keep = ObjectFolder(folder.path / "full_snapshots").keep
            for version, tensors in enumerate(versions):
                path = root / f"{version}.safetensors"
                digest = tensor_state.write(path, tensors)
                encoding = Encoding(Snapshot(path), base, name="d8-zstd")
                new = release.NewVersion("r1", version, digest)
                commit = await release.release(bus, encoding, new, commit, keep, signer=key)
                base = Snapshot(path)


STOPS = [0, 2]
"""The checkpoint's own end, <|endoftext|>, and the chat template's, <|im_end|>."""


def moved(model: PolicyModel) -> dict[str, Tensor]:
    """Other weights than the checkpoint's, as steps of training leave them."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.state()


def compared(folder: Path, config: PolicyConfig, state: dict[str, Tensor]) -> None:
    """Logits of transformers on the folder against the policy's."""
    mine = Model(config, tiny.numerics(config), seed=None)
    mine.load_state(state)
    ids = tiny.tokens(config, 100)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = mine.logits(mine(ids, [100]))
        torch.testing.assert_close(loaded.eval()(ids[None]).logits[0], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_of_a_run_that_began_with_a_checkpoint(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "base"
    theirs(kind, KINDS[kind]).save_pretrained(source)
    (source / "tokenizer.json").write_text(original().to_str())
    backend = original()
    backend.decoder = decoders.ByteLevel()
    bundle = RendererBundle(
        renderer="hermes",
        tokenizer_json=backend.to_str(),
        chat_template=CHATML,
        special_tokens={"eos_token": "<|im_end|>"},
        eos_ids=(STOPS[0],),
        generation={"temperature": 0.6, "do_sample": True},
    )
    config = Config(
        run=RunSection(dir=str(tmp_path / "runs"), id="r1"),
        policy=Policy(checkpoint=str(source)),
        mid_training=MidTraining(tokens=0),
        trainer=Trainer(lora=Lora(rank=0 if kind == "qwen3" else 4)),
    )
    trainer = start(tmp_path, config)
    model = trainer.state.model
    states = [model.state(), moved(model)]
    asyncio.run(publish(tmp_path, states, bundle))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "r1", "out", "--version", "1"]) == 0
    assert "version 1 of run r1 in out: float32" in capsys.readouterr().out
    compared(tmp_path / "out", model.config, states[1])
    assert main(["export", "r1", "first", "--version", "0"]) == 0
    compared(tmp_path / "first", model.config, states[0])
    code = main(["export", "r1", "adapter", "--as", "adapter", "--version", "1"])
    if kind == "qwen3":
        assert code == 2 and "the policy has no adapter" in capsys.readouterr().err
    else:
        assert code == 0
        settings = json.loads(Path("adapter/adapter_config.json").read_text())
        assert (settings["r"], settings["base_model_name_or_path"]) == (4, str(source))
        written = safetensors.torch.load_file("adapter/adapter_model.safetensors")
        adapters = {name.removeprefix("base_model.model."): value for name, value in written.items()}
        assert adapters.keys() == {name for name in states[1] if ".lora_" in name}
        assert all(torch.equal(value, states[1][name]) for name, value in adapters.items())
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer("a = 12")["input_ids"] == original().encode("a = 12").ids
    assert tokenizer.chat_template == CHATML
    generation = json.loads(Path("out/generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "do_sample": True, "eos_token_id": STOPS}
    card = Path("out/README.md").read_text()
    assert "| version | 1 |" in card and "checkpoint `base`" in card and "The run has no report yet" in card
    assert main(["export", "r1", "out"]) == 2
    assert "out is not empty" in capsys.readouterr().err


def test_an_own_policy_with_experts_in_eight_bits_and_the_figures_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.train((), 256 + len(schemas.tags()))
    (tmp_path / "tokenizer.json").write_text(tokenizer.dump())
    shape = Policy(dim=64, heads=2, head_dim=32, expert_dim=32, vocab=len(tokenizer), expert_format="mxfp8")
    run = RunSection(dir=str(tmp_path / "runs"), id="r1")
    config = Config(run=run, policy=shape, mid_training=MidTraining(tokens=0))
    trainer = start(tmp_path, config)
    state = trainer.state.model.state()
    asyncio.run(publish(tmp_path, [state], terse_bundle(tokenizer.dump())))
    report = {"steps": 3, "heldout_tasks": 8, "heldout_after_t1": 0.5, "unseen_templates": {"after_t1": 0.25}}
    (tmp_path / "runs/r1/report.json").write_text(json.dumps(report))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "r1", "out"]) == 0
    read, tensors = checkpoint.load("out")
    assert read.expert_format == "" and "quantization_config" not in json.loads(Path("out/config.json").read_text())
    compared(tmp_path / "out", read, tensors)
    restored = precision.restore(state)
    assert all(torch.equal(tensor.float(), restored[name].float()) for name, tensor in tensors.items())
    stop = json.loads(Path("out/generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.decode(stop) == "</turn>"
    card = Path("out/README.md").read_text()
    assert "| held-out, temperature 1, last version | 0.5 |" in card and "no report" not in card
