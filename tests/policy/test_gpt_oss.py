"""gpt-oss against transformers: logits, experts in MXFP4, the way out again; and what does not compute it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from headrace.config import Mesh
from headrace.policy.config import CheckpointError
from headrace.policy.layout import checkpoint, hugging_face, sizes
from headrace.policy.model import Model
from tests.policy.test_families import QWEN, compared, theirs
from tests.policy.test_model import decoded
from tests.support import tiny
from tests.support.world import CONFIG

GPT_OSS: dict[str, Any] = QWEN | {
    "num_local_experts": 6, "num_experts_per_tok": 2, "hidden_size": 64, "sliding_window": 30,
}  # fmt: skip


def test_a_gpt_oss_gives_its_logits_and_its_bits_reads_mxfp4_and_goes_out_again(tmp_path: Path) -> None:
    # Every worker imports this file, one runs it: the import takes two seconds.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = theirs("gpt_oss", GPT_OSS)
    experts = [layer.mlp.experts for layer in model.model.layers]
    packed: dict[str, Tensor] = {}
    with torch.no_grad():
        for index, layer in enumerate(experts):
            for name in ("gate_up_proj", "down_proj"):
                whole = getattr(layer, name)
                blocks = torch.randint(0, 256, (6, whole.shape[2], whole.shape[1] // 32, 16), dtype=torch.uint8)
                scales = torch.randint(122, 125, blocks.shape[:-1], dtype=torch.uint8)
                whole.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                at = f"model.layers.{index}.mlp.experts.{name}"
                packed |= {at + "_blocks": blocks, at + "_scales": scales}
    model.save_pretrained(tmp_path / "plain")
    config, tensors = checkpoint.load(tmp_path / "plain")
    ids = tiny.tokens(config, 200)
    compared(tmp_path / "plain", model, ids)

    folder = tmp_path / "mxfp4"
    folder.mkdir()
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    left = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_proj")}
    save_file(left | packed, folder / "model.safetensors")
    again, same = checkpoint.load(folder)
    assert again == config and same.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in same.items())

    mine = Model(config, tiny.numerics(config), seed=None)
    mine.load_state(same)
    checkpoint.save(tmp_path / "out", mine, config)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids[None]).logits, model(ids[None]).logits)

    lengths = [129, 1, 70]
    assert sizes.parameters(config).total == sum(parameter.numel() for parameter in mine.parameters())
    recorder: list[Tensor] = []
    whole = mine(ids, lengths, recorder=recorder)
    assert torch.equal(mine(ids, lengths, routed=torch.stack(recorder, 1)), whole)
    for got, want in zip(
        decoded(mine, list(torch.split(ids, lengths)), first=90, chunk=37),
        torch.split(whole.detach(), lengths),
        strict=True,
    ):
        assert torch.equal(got, want)
    torch.autograd.backward(mine.selected_logprobs(whole, ids.flip(0))[0].sum())
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in mine.parameters())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["full_attention", "full_attention"]}, "layer_types"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"attention_bias": False}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
    ],
)
def test_a_gpt_oss_that_is_unlike_the_published_ones_is_refused(changes: dict[str, Any], text: str) -> None:
    raw = transformers.GptOssConfig(**GPT_OSS).to_dict()
    hugging_face.parse(raw)
    with pytest.raises(CheckpointError, match=text):
        hugging_face.parse(raw | changes)


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        ("engine", {"kind": "sglang"}, "kind = 'sglang'"),
        ("trainer", {"mesh": Mesh(shard=2)}, "processes = 2"),
    ],
)
def test_parts_that_do_not_compute_a_gpt_oss_are_refused(
    tmp_path: Path, section: str, changes: dict[str, Any], text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(transformers.GptOssConfig(**GPT_OSS).to_dict()))
    policy = msgspec.structs.replace(CONFIG.policy, checkpoint=str(tmp_path))
    trainer = msgspec.structs.replace(CONFIG.trainer, device="auto")
    config = msgspec.structs.replace(CONFIG, policy=policy, trainer=trainer)
    shape = hugging_face.of_run(config)
    assert shape.gpt_oss
    hugging_face.check_device(shape, "cpu")
    if not torch.cuda.is_available():
        hugging_face.check_device(shape, "auto")
    with pytest.raises(CheckpointError, match="device = 'cuda': gpt_oss is not supported on a GPU; set it to 'cpu'"):
        hugging_face.check_device(shape, "cuda")
    changed = msgspec.structs.replace(getattr(config, section), **changes)
    with pytest.raises(CheckpointError, match=text):
        hugging_face.of_run(msgspec.structs.replace(config, **{section: changed}))
