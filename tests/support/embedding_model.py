"""A BERT encoder of two layers with random weights in sentence-transformers layout: small, and made in milliseconds."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

WIDTH, INNER, LAYERS, LENGTH = 64, 128, 2, 64


def write(folder: Path, texts: Sequence[str]) -> Path:
    """Write the model; its vocabulary are the words of `texts`."""
    folder.mkdir(parents=True, exist_ok=True)
    split = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]
    tokenizer = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": len(names),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": INNER,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": LENGTH,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 0.3

    state = {
        "embeddings.word_embeddings.weight": matrix(len(names), WIDTH),
        "embeddings.position_embeddings.weight": matrix(LENGTH, WIDTH) * 0.1,
        "embeddings.token_type_embeddings.weight": matrix(2, WIDTH),
        "pooler.dense.weight": matrix(WIDTH, WIDTH),
        "pooler.dense.bias": matrix(WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        shapes = {
            **{f"attention.self.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")},
            "attention.output.dense": (WIDTH, WIDTH),
            "intermediate.dense": (INNER, WIDTH),
            "output.dense": (WIDTH, INNER),
        }
        for name, shape in shapes.items():
            state[f"{at}.{name}.weight"], state[f"{at}.{name}.bias"] = matrix(*shape), matrix(shape[0])
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        state[f"{name}.weight"], state[f"{name}.bias"] = 1 + matrix(WIDTH), matrix(WIDTH)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
