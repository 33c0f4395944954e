"""Computes the checksums that a server must report from a file whose state hash was verified.

Idea: SGLang and vLLM hash the bits that they compute with, under the same fused names. This module fuses the file's
tensors in the same way (query, key and value; gate and up of all experts; the vocabulary padded to a multiple of 64
rows), hashes them with the server's function (`Backend.digest`), and compares. Equality proves that the server serves
the version that the trainer published, after any number of updates in place.

With tensor parallelism each rank reports its part: heads, inner width and vocabulary are
divided, norms and routers are not. With expert parallelism the ranks form groups, each of which has a run of the
experts and divides their inner width.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.policy.config import PolicyConfig
from headrace.weights import snapshot, tensor_state

VOCAB_PAD = 64
Digest = Callable[..., str]
"""A server's checksum of a tensor, from its parts (`*parts`), whose bytes are one behind the other: no copy is made."""
RECENT = 4
"""Number of versions, layouts and dtypes whose checksums are kept."""


class Ranks(NamedTuple):
    """How a server's processes divide a model."""

    tensor: int = 1
    """Tensor-parallel ranks: all of them."""
    experts: int = 1
    """Groups of ranks, each with a run of the experts."""


ONE = Ranks()


def largest(config: PolicyConfig, ranks: Ranks, dtype: str) -> int:
    """Bytes of the largest fused tensor of a rank."""
    rows = max(config.vocab + VOCAB_PAD, 2 * config.expert_dim * max(1, config.experts))
    return rows * config.dim // ranks.tensor * int(getattr(torch, dtype).itemsize)


def unknown(config: PolicyConfig, ranks: Ranks = ONE) -> str:
    """Why the checksums of this model on these ranks are not known here; empty when they are: those of Llama, or Qwen3
    with all layers dense or all layers a mixture.

    On a GPU the MoE runner decides the layout of the experts, so that the first comparison may still differ.
    """
    count, groups = ranks
    parts = (config.heads % count or VOCAB_PAD % count or count % groups or config.expert_dim % (count // groups)) or (
        config.kv_heads % count and count % config.kv_heads
    )
    reasons = {
        "adapters": bool(config.adapter),
        "the provider transformers": bool(config.source),
        f"the architecture {config.model_type}": config.model_type not in ("", "llama"),
        "biases of attention": config.qkv_bias or config.out_bias,
        "latent attention": config.latent is not None,
        "dense layers beside a mixture": config.dense_layers,
        "shared experts": config.shared_experts,
        f"experts in {config.expert_format}": config.expert_format,
        f"{count} tensor-parallel ranks, which do not divide the model's heads, inner width or vocabulary": parts,
        f"{groups} groups of ranks, which do not divide {config.experts} experts": groups > 1
        and (config.experts % groups or not config.experts),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def expected(
    path: str | Path, config: PolicyConfig, dtype: str, digest: Digest, ranks: Ranks = ONE, device: str = "cpu"
) -> dict[str, str]:
    """The checksums by `label`, of a snapshot file that a server on `device` holds in `dtype`. It holds the file alone,
    and copies of what is converted or divided by columns."""
    kind, tensors = getattr(torch, dtype), tensor_state.read(path)
    threads = 1 if device == "cpu" else snapshot.threads()
    out: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[tuple[str, Future[str]]] = deque()
        for rank in range(ranks.tensor):
            for name, parts in _fused(shard(tensors, config, rank, ranks), config, ranks):
                if len(pending) == threads:
                    first, sum_of_first = pending.popleft()
                    out[first] = sum_of_first.result()
                pending.append((label(name, rank, ranks.tensor), pool.submit(_digest_as, digest, parts, kind)))
        out.update((name, value.result()) for name, value in pending)
    return out


def _digest_as(digest: Digest, parts: Sequence[Tensor], dtype: torch.dtype) -> str:
    return digest(*(part.to(dtype) for part in parts))


def sha256(*parts: Tensor) -> str:
    """The SHA-256 (hex) of a tensor's bits, from its parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(tensor_state.bits(part).data)
    return digest.hexdigest()


class Expectations:
    """The expected checksums of the last versions, computed once for all servers that hold the same bits in the same
    dtype, ranks and kind of device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, Ranks, str], asyncio.Future[dict[str, str]]] = {}

    async def of(
        self, path: Path, state_hash: str, config: PolicyConfig, dtype: str, digest: Digest, ranks: Ranks, device: str
    ) -> dict[str, str]:
        """`expected`, of a file with this state hash. The caller does not change its file until this returns or is
        cancelled; after a cancellation another caller computes from its own file."""
        key = state_hash, dtype, ranks, device
        while (sums := self._sums.get(key)) is not None:
            await asyncio.wait([sums])
            if not sums.cancelled():
                return sums.result()
        sums = self._sums[key] = asyncio.get_running_loop().create_future()
        try:
            sums.set_result(await asyncio.to_thread(expected, path, config, dtype, digest, ranks, device))
        except BaseException:
            sums.cancel()
            del self._sums[key]
            raise
        while len(self._sums) > RECENT and (oldest := next(iter(self._sums))) != key:
            del self._sums[oldest]
        return sums.result()


def label(name: str, rank: int, ranks: int) -> str:
    """The fused name, behind the rank's number where there are several."""
    return name if ranks == 1 else f"rank {rank}: {name}"


def shard(tensors: Mapping[str, Tensor], config: PolicyConfig, rank: int, of: Ranks) -> dict[str, Tensor]:
    """The part of each tensor that a rank holds, by Hugging Face names; the vocabulary is padded first."""
    ranks = of.tensor
    if ranks == 1:
        return dict(tensors)
    out: dict[str, Tensor] = {}
    copies = max(1, ranks // config.kv_heads)  # ranks that hold the same key-value head
    group, member = divmod(rank, ranks // of.experts)
    for name, tensor in tensors.items():
        parts = name.split(".")
        kind = parts[-2]
        if "experts" in parts:
            if int(parts[-3]) // (config.experts // of.experts) == group:
                out[name] = tensor.chunk(ranks // of.experts, 1 if kind == "down_proj" else 0)[member]
            continue
        if kind in ("k_proj", "v_proj"):
            out[name] = tensor.chunk(ranks // copies)[rank // copies]
        elif kind in ("q_proj", "gate_proj", "up_proj"):
            out[name] = tensor.chunk(ranks)[rank]
        elif kind in ("o_proj", "down_proj"):
            out[name] = tensor.chunk(ranks, 1)[rank]
        elif kind in ("embed_tokens", "lm_head"):
            padded = F.pad(tensor, (0, 0, 0, -config.vocab % VOCAB_PAD))
            out[name] = padded.chunk(ranks)[rank]
        else:
            out[name] = tensor
    return out


def fused(tensors: Mapping[str, Tensor], config: PolicyConfig, ranks: Ranks = ONE) -> dict[str, Tensor]:
    """Hugging Face tensors, or a rank's `shard` of them, under the names and in the layout of SGLang's and
    vLLM's Qwen3 and Llama models."""
    out = {name: torch.cat(parts) for name, parts in _fused(tensors, config, ranks)}
    held = config.experts // ranks.experts
    return {
        name: whole.view(held, -1, whole.shape[-1]) if ".experts." in name else whole for name, whole in out.items()
    }


def _fused(tensors: Mapping[str, Tensor], config: PolicyConfig, ranks: Ranks) -> Iterator[tuple[str, list[Tensor]]]:
    """The items of `fused`, each as its parts in order."""
    yield "model.norm.weight", [tensors["model.norm.weight"]]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            padding = -config.vocab % VOCAB_PAD if ranks.tensor == 1 else 0
            yield name, [tensors[name], tensors[name].new_zeros(padding, config.dim)]
    for index in range(config.layers):
        at = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", [tensors[f"{at}{name}.weight"]]
        for name in ("q_norm", "k_norm", "o_proj") if config.qk_norm else ("o_proj",):
            yield f"{at}self_attn.{name}.weight", [tensors[f"{at}self_attn.{name}.weight"]]
        yield f"{at}self_attn.qkv_proj.weight", [tensors[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"]
        if config.experts:
            names = (f"{at}mlp.experts.{expert}." for expert in range(config.experts))
            experts = [name for name in names if f"{name}up_proj.weight" in tensors]
            yield f"{at}mlp.gate.weight", [tensors[f"{at}mlp.gate.weight"]]
            halves = [tensors[f"{name}{half}_proj.weight"] for name in experts for half in ("gate", "up")]
            yield f"{at}mlp.experts.w13_weight", halves
            yield f"{at}mlp.experts.w2_weight", [tensors[f"{name}down_proj.weight"] for name in experts]
        else:
            yield f"{at}mlp.gate_up_proj.weight", [tensors[f"{at}mlp.{half}_proj.weight"] for half in ("gate", "up")]
            yield f"{at}mlp.down_proj.weight", [tensors[f"{at}mlp.down_proj.weight"]]


def difference(wanted: Mapping[str, str], served: Mapping[str, str]) -> str:
    """A text about the first difference; empty when every tensor is there with its bits. A tensor that is served with
    an empty checksum is not compared."""
    wrong = sorted(name for name in wanted if served.get(name) not in (wanted[name], ""))
    extra = sorted(name for name in served if name not in wanted and not name.endswith("_cache"))
    if wrong:
        state = "is missing" if wrong[0] not in served else "has other bits"
        return f"{len(wrong)} of {len(wanted)} tensors in the server differ from the version's; {wrong[0]} {state}"
    return f"the server holds {len(extra)} tensors that the version has not, such as {extra[0]}" if extra else ""
