"""The modules of a policy that an adapter may change, by Hugging Face's names. No import of torch for `native`.

Routed experts have no adapters: a mixture takes them on its attention alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.policy.config import Adapter, CheckpointError, PolicyConfig

A, B = "lora_A.weight", "lora_B.weight"
"""The last part of the published names, as PEFT has them."""
_MLP = ("gate_proj", "up_proj", "down_proj")


class Module(NamedTuple):
    """One projection: Hugging Face's name within its layer, and its widths."""

    path: str
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """The last part of the path: q_proj."""
        return self.path.rpartition(".")[2]


def modules(c: PolicyConfig, layer: int) -> dict[str, tuple[Module, ...]]:
    """The projections of a layer by the name of the (fused) parameter that holds them, in the order of its rows."""
    value = c.latent.value_dim if c.latent else c.head_dim
    out: dict[str, tuple[Module, ...]] = {"out": (Module("self_attn.o_proj", c.heads * value, c.dim),)}
    if c.latent is None:
        rows = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        out["qkv"] = tuple(Module(f"self_attn.{n}_proj", c.dim, heads * c.head_dim) for n, heads in rows.items())
    else:
        low = c.latent
        out["kv_a"] = (Module("self_attn.kv_a_proj_with_mqa", c.dim, low.kv_rank + low.rope_dim),)
        out["kv_b"] = (Module("self_attn.kv_b_proj", low.kv_rank, c.heads * (low.nope_dim + low.value_dim)),)
        width = c.heads * c.head_dim
        if low.q_rank:
            out["q_a"] = (Module("self_attn.q_a_proj", c.dim, low.q_rank),)
            out["q_b"] = (Module("self_attn.q_b_proj", low.q_rank, width),)
        else:
            out["q"] = (Module("self_attn.q_proj", c.dim, width),)
    if not c.experts:
        wide = c.dense_dim or c.expert_dim
        out["gate_up"] = (Module("mlp.gate_proj", c.dim, wide), Module("mlp.up_proj", c.dim, wide))
        out["down"] = (Module("mlp.down_proj", wide, c.dim),)
    return out


def targeted(c: PolicyConfig, layer: int) -> list[Module]:
    """The projections of a layer that the policy's adapter changes."""
    if c.adapter is None:
        return []
    return [module for group in modules(c, layer).values() for module in group if module.name in c.adapter.targets]


def parameters(c: PolicyConfig) -> int:
    """Number of the adapter's elements."""
    if c.adapter and c.adapter.elements:
        return c.adapter.elements
    rank = c.adapter.rank if c.adapter else 0
    return sum(rank * (m.inputs + m.outputs) for layer in range(c.layers) for m in targeted(c, layer))


def resolved(c: PolicyConfig, rank: int, alpha: float, targets: Sequence[str]) -> Adapter:
    """The adapter with these targets, all possible ones where none is named. CheckpointError for one that the policy
    does not have."""
    if c.source:
        from headrace.policy.hugging import adapter  # it imports transformers

        return adapter.resolved(c, rank, alpha, targets)
    possible = [module.name for group in modules(c, 0).values() for module in group]
    for name in targets:
        if name not in possible:
            why = (
                "adapters of experts are not supported" if c.experts and name in _MLP else "the policy has no such one"
            )
            raise CheckpointError(
                f"[trainer.lora] targets: expected names among {', '.join(possible)}, got {name!r}: {why}"
            )
    return Adapter(rank=rank, alpha=alpha, targets=tuple(name for name in possible if not targets or name in targets))
