"""The embedding model: a BERT encoder from a folder in sentence-transformers layout, in plain torch.

Texts become unit vectors by mean pooling over their tokens. Weights are int8 per output channel, activations int8 per
row, sums int32: the products are exact, and on a processor without bfloat16 three times as fast as float32. Every batch
has one of a few fixed shapes, padded if there are fewer or shorter texts. So the vector of a text does not depend on
the other texts of the batch, and an index that was built in another order holds the same bits.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from headrace.search.models import SearchModelError, bert_config

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
        self._folder = folder
        config = bert_config(folder)
        try:
            state = load_file(folder / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(max_length=tokens)
        except Exception as error:  # tokenizers raises Exception itself
            raise SearchModelError(f"[search] model {folder} cannot be read: {error}") from None
        self.width, self._heads, self._layers = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_hidden_layers,
        )
        self._eps, self._pad = config.layer_norm_eps, config.pad_token_id
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in state else ""
        self._w = {
            name.removeprefix(prefix): value.float() for name, value in state.items() if value.is_floating_point()
        }
        self._words = self._check(tokens)
        self._linear: dict[str, _Int8] = {}
        self._fuse()
        # One vector at the start: a model whose numbers or words are damaged is refused before a search waits for it.
        self.embed(["def a_z(): \N{SNOWMAN} zqxjv"], batch=1)

    def _refuse(self, why: str) -> SearchModelError:
        return SearchModelError(f"[search] model {self._folder}: {why}")

    def _check(self, tokens: int) -> int:
        """Check the shapes of all tensors, and that the tokens of a text have vectors; the number of words."""
        for name, wanted in self._shapes():
            if name not in self._w:
                raise self._refuse(f"model.safetensors has no tensor {name!r} of floating-point numbers")
            got = tuple(self._w[name].shape)
            if len(got) != len(wanted) or any(size not in (None, had) for size, had in zip(wanted, got, strict=True)):
                sizes = " x ".join("any" if size is None else str(size) for size in wanted)
                raise self._refuse(f"model.safetensors: {name} has shape {list(got)}, expected {sizes}")
        words, positions = (self._w[f"embeddings.{kind}_embeddings.weight"].shape[0] for kind in ("word", "position"))
        if not words or not self._w["embeddings.token_type_embeddings.weight"].shape[0]:
            raise self._refuse("model.safetensors has a table of embeddings without a row")
        if -(-tokens // STRIDE) * STRIDE > positions:
            raise self._refuse(f"it has {positions} positions, too few for [search] tokens = {tokens}")
        highest = max([self._pad, *self._tokenizer.get_vocab().values()])
        if highest >= words:
            raise self._refuse(f"tokenizer.json or config.json has token {highest}, and the model has {words} words")
        return words

    def _shapes(self) -> Iterator[tuple[str, tuple[int | None, ...]]]:
        """Name and shape of every tensor that is used; None for any size."""
        width = self.width
        for kind in ("word", "position", "token_type"):
            yield f"embeddings.{kind}_embeddings.weight", (None, width)
        inner = self._w.get("encoder.layer.0.intermediate.dense.bias")
        between = None if inner is None else inner.numel()
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}"
            for name, rows, columns in (
                *((f"attention.self.{kind}", width, width) for kind in ("query", "key", "value")),
                ("attention.output.dense", width, width),
                ("intermediate.dense", between, width),
                ("output.dense", width, between),
            ):
                yield f"{at}.{name}.weight", (rows, columns)
                yield f"{at}.{name}.bias", (rows,)
            norms = [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
            for name in norms if layer else ["embeddings.LayerNorm", *norms]:
                yield f"{name}.weight", (width,)
                yield f"{name}.bias", (width,)

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
        """Unit vectors [texts, width] of any number of texts. SearchModelError."""
        try:
            encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        except Exception as error:  # tokenizers raises Exception itself
            raise self._refuse(f"tokenizer.json cannot encode a text: {error}") from None
        if (highest := max((max(ids, default=0) for ids in encoded), default=0)) >= self._words:
            raise self._refuse(f"tokenizer.json gives token {highest}, and the model has {self._words} words")
        lengths = [-(-max(len(ids), 1) // STRIDE) * STRIDE for ids in encoded]
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
                out[part] = self._computed(ids, used)[: len(part)].numpy()
        if not np.isfinite(out).all():
            raise self._refuse("model.safetensors gives a vector that is not finite")
        return out

    def _computed(self, ids: Tensor, used: Tensor) -> Tensor:
        try:
            return self._forward(ids, used)
        except RuntimeError as error:  # a size that the int8 product does not take
            raise self._refuse(f"its vectors cannot be computed: {error}") from None

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
