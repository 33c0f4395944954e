"""The embedding model: a BERT encoder from a folder in sentence-transformers layout, in plain torch.

Texts become unit vectors by mean pooling over their tokens. Weights are int8 per output channel, activations int8 per
row, sums int32: the products are exact, and on a processor without bfloat16 three times as fast as float32. Every batch
has one of a few fixed shapes, padded if there are fewer or shorter texts. So the vector of a text does not depend on
the other texts of the batch, and an index that was built in another order holds the same bits.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from headrace.search.models import SearchModelError

BATCH = 8
"""Rows of a forward pass over chunks."""
STRIDE = 16
"""Lengths are padded to multiples of it."""


class _Int8(NamedTuple):
    """A linear layer: weights [in, out] in int8, their scales [out], the bias."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> "_Int8":
        scale = weight.abs().amax(dim=1) / 127.0
        return cls((weight / scale[:, None]).round().to(torch.int8).t().contiguous(), scale, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: float32 [rows, in]."""
        scale = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True).clamp_min_(1e-12) / 127.0
        product = torch._int_mm((x * scale.reciprocal()).round_().to(torch.int8), self.weight)
        return torch.addcmul(self.bias, torch.mul(product, scale), self.scale)


class Encoder:
    """The model in memory; one object may be used by several threads."""

    def __init__(self, folder: Path, tokens: int) -> None:
        """tokens: how much of a text is read, special tokens included. SearchModelError for a folder whose model is
        not a BERT encoder with mean pooling."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            state = load_file(folder / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises Exception itself
            raise SearchModelError(f"[search] model {folder} cannot be read: {error}") from None
        if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
            raise SearchModelError(f"[search] model {folder}: expected model_type bert with hidden_act gelu")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length=tokens)
        self.width: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._layers: int = config["num_hidden_layers"]
        self._eps: float = config["layer_norm_eps"]
        self._pad: int = config.get("pad_token_id", 0)
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in state else ""
        self._w = {
            name.removeprefix(prefix): value.float() for name, value in state.items() if value.is_floating_point()
        }
        self._linear: dict[str, _Int8] = {}
        try:
            self._fuse()
        except KeyError as error:
            raise SearchModelError(f"[search] model {folder}: model.safetensors has no tensor {error}") from None

    def _fuse(self) -> None:
        """Query, key and value as one matrix a layer; word and segment embeddings as one table."""
        w = self._w
        kinds = w.pop("embeddings.token_type_embeddings.weight")
        w["embeddings.word_embeddings.weight"] = w["embeddings.word_embeddings.weight"] + kinds[0]
        for layer, part in itertools.product(range(self._layers), ("weight", "bias")):
            at = f"encoder.layer.{layer}.attention.self"
            parts = [w.pop(f"{at}.{name}.{part}") for name in ("query", "key", "value")]
            w[f"{at}.qkv.{part}"] = torch.cat(parts)
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}"
            for name in ("attention.self.qkv", "attention.output.dense", "intermediate.dense", "output.dense"):
                self._linear[f"{at}.{name}"] = _Int8.of(w.pop(f"{at}.{name}.weight"), w.pop(f"{at}.{name}.bias"))

    def embed(self, texts: Sequence[str], batch: int = BATCH) -> NDArray[np.float32]:
        """Unit vectors [texts, width] of any number of texts."""
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        lengths = [-(-len(ids) // STRIDE) * STRIDE for ids in encoded]
        out = np.zeros((len(encoded), self.width), dtype=np.float32)
        order = sorted(range(len(encoded)), key=lambda index: lengths[index])
        for length, group in itertools.groupby(order, key=lambda index: lengths[index]):
            rows = list(group)
            for start in range(0, len(rows), batch):
                part = rows[start : start + batch]
                ids = torch.full((batch, length), self._pad, dtype=torch.long)
                used = torch.zeros((batch, length), dtype=torch.bool)
                used[:, 0] = True  # a row of padding must have a token to attend to
                for row, index in enumerate(part):
                    ids[row, : len(encoded[index])] = torch.tensor(encoded[index])
                    used[row, : len(encoded[index])] = True
                out[part] = self._forward(ids, used)[: len(part)].numpy()
        return out

    @torch.inference_mode()
    def _forward(self, ids: Tensor, used: Tensor) -> Tensor:
        rows, length = ids.shape
        w, width, linear = self._w, self.width, self._linear
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:length]
        x = self._norm(x.view(rows * length, width), "embeddings.LayerNorm")
        mask = used[:, None, None, :]
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}"
            qkv = linear[f"{at}.attention.self.qkv"](x).view(rows, length, 3, self._heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            mixed = mixed.transpose(1, 2).reshape(rows * length, width)
            x = self._norm(linear[f"{at}.attention.output.dense"](mixed).add_(x), f"{at}.attention.output.LayerNorm")
            inner = functional.gelu(linear[f"{at}.intermediate.dense"](x))
            x = self._norm(linear[f"{at}.output.dense"](inner).add_(x), f"{at}.output.LayerNorm")
        weights = used.to(torch.float32)[:, :, None]
        mean = (x.view(rows, length, width) * weights).sum(1) / weights.sum(1)
        return functional.normalize(mean, dim=1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (self.width,), self._w[f"{name}.weight"], self._w[f"{name}.bias"], self._eps)
