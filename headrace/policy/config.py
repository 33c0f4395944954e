"""Shape of a policy, and its Hugging Face config.json.

Only what changes the numbers is a field. What a checkpoint asks for and this model does not compute (sliding windows,
attention bias, dense layers among sparse ones) is refused by name, never ignored.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

if TYPE_CHECKING:
    from headrace.config import Policy

Dtype = Literal["float32", "bfloat16"]


class CheckpointError(Exception):
    """A checkpoint that cannot be read, or asks for something this model does not compute."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a Qwen3-MoE (experts > 0) or dense Qwen3 (experts 0) decoder; lengths in elements."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_dim: int
    """Inner width of an expert, or of the MLP of a dense model."""
    vocab: int
    dtype: Dtype = "float32"
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    normalise_top_k: bool = True
    tied: bool = False
    max_positions: int = 32_768

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise CheckpointError(f"top_k {self.top_k} of {self.experts} experts is not possible")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd: rotary pairs need an even one")

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of parameters and activations."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    @property
    def routed_dtype(self) -> str:
        """numpy dtype of routed experts: |u1 up to 255 experts, <u2 beyond; the largest value means none."""
        return "|u1" if self.experts <= 255 else "<u2"

    @classmethod
    def from_section(cls, section: "Policy") -> "PolicyConfig":
        """From the [policy] section; its `checkpoint`, a Hugging Face folder, replaces everything else."""
        if section.checkpoint:
            return cls.read(section.checkpoint)
        fields = {name: getattr(section, name) for name in section.__struct_fields__ if name != "checkpoint"}
        return cls(**{name: value for name, value in fields.items() if name in cls.__struct_fields__})

    @classmethod
    def read(cls, folder: str | Path) -> "PolicyConfig":
        """From config.json in a folder. CheckpointError when it is missing, broken or asks for something else."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "PolicyConfig":
        """From the content of a Hugging Face config.json of model type qwen3_moe or qwen3."""
        kind = raw.get("model_type")
        if kind not in ("qwen3_moe", "qwen3"):
            raise CheckpointError(f"model_type {kind!r} is not qwen3_moe or qwen3")
        sparse = kind == "qwen3_moe"
        plain = {
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "rope_scaling": None,
        }
        for key, expected in plain.items():
            if raw.get(key, expected) not in (expected, None):
                raise CheckpointError(f"{key} {raw[key]!r} is not supported, only {expected!r}")
        rope = raw.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"rope_type {rope['rope_type']!r} is not supported, only 'default'")
        try:
            heads = raw["num_attention_heads"]
            return cls(
                dim=raw["hidden_size"],
                layers=raw["num_hidden_layers"],
                heads=heads,
                kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
                experts=(raw.get("num_experts") or raw["num_local_experts"]) if sparse else 0,
                top_k=raw["num_experts_per_tok"] if sparse else 0,
                expert_dim=raw["moe_intermediate_size"] if sparse else raw["intermediate_size"],
                vocab=raw["vocab_size"],
                dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
                eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
                normalise_top_k=bool(raw.get("norm_topk_prob", not sparse)),
                tied=bool(raw.get("tie_word_embeddings", False)),
                max_positions=raw.get("max_position_embeddings", 32_768),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]!r}") from None

    def to_hf(self) -> dict[str, Any]:
        """Content of config.json, readable by transformers 4 and 5 and by SGLang."""
        sparse: dict[str, Any] = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_dim,
            "norm_topk_prob": self.normalise_top_k,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
        }
        return {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.expert_dim,
            **(sparse if self.experts else {}),
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "torch_dtype": self.dtype,
            "dtype": self.dtype,
        }
