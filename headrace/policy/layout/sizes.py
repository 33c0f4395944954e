"""Shapes and counts of the parameters of `policy.model.Model`, and operations, in closed form: no allocation, no import
of torch."""

from functools import cache
from typing import NamedTuple

from headrace.config import Config
from headrace.policy.adapters import shape
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import hugging_face


class Parameters(NamedTuple):
    """Counts of elements."""

    total: int
    frozen: int
    """Without gradient and master: corrections of routers; with an adapter, everything else."""
    experts: int
    """In mixtures, without shared experts."""


@cache
def parameters(config: PolicyConfig) -> Parameters:
    """Numbers of elements of the parameters of `policy.model.Model`."""
    layers = [_layer(config, index) for index in range(config.layers)]
    outside = config.vocab * config.dim * (1 if config.tied else 2) + config.dim
    frozen = config.experts * config.sparse_layers if config.scores == "sigmoid" else 0
    experts = layer_experts(config) * config.sparse_layers
    whole, adapter = sum(layers) + outside, shape.parameters(config)
    return Parameters(whole + adapter, whole if adapter else frozen, experts)


def layer_experts(config: PolicyConfig) -> int:
    """Number of elements of the experts of one mixture."""
    return 3 * config.experts * config.expert_dim * config.dim


def _layer(c: PolicyConfig, index: int) -> int:
    return sum(rows * width for rows, width in _matrices(c, index)) + _vectors(c, index)


def _matrices(c: PolicyConfig, index: int) -> list[tuple[int, int]]:
    """Rows and length of the last dimension of a layer's parameters with two or three dimensions."""
    if c.latent:
        low, width = c.latent, c.heads * (c.latent.nope_dim + c.latent.rope_dim)
        out = [(low.q_rank, c.dim), (width, low.q_rank)] if low.q_rank else [(width, c.dim)]
        out += [(low.kv_rank + low.rope_dim, c.dim), (c.heads * (low.nope_dim + low.value_dim), low.kv_rank)]
        out.append((c.dim, c.heads * low.value_dim))
    else:
        out = [((c.heads + 2 * c.kv_heads) * c.head_dim, c.dim), (c.dim, c.heads * c.head_dim)]
    if c.gpt_oss:
        out += [(c.experts, 2 * c.expert_dim), (c.experts, c.dim)]  # biases of experts
    if not c.sparse(index):
        inner = c.dense_dim or c.expert_dim
        return [*out, (2 * inner, c.dim), (c.dim, inner)]
    out += [(c.experts, c.dim), (c.experts * 2 * c.expert_dim, c.dim), (c.experts * c.dim, c.expert_dim)]
    shared = c.shared_experts * c.expert_dim
    return out + ([(2 * shared, c.dim), (c.dim, shared)] if shared else [])


def _vectors(c: PolicyConfig, index: int) -> int:
    """Number of elements of a layer's parameters with one dimension."""
    count = 2 * c.dim
    if c.latent:
        count += c.latent.q_rank + c.latent.kv_rank
    else:
        count += (2 * c.head_dim if c.qk_norm else 0) + (c.dim if c.out_bias else 0)
        count += (c.heads + 2 * c.kv_heads) * c.head_dim if c.qkv_bias else 0
    if c.gpt_oss:
        count += c.heads + c.experts  # sinks, the router's bias
    return count + (c.experts if c.sparse(index) and c.scores == "sigmoid" else 0)


def forward_flops(policy: PolicyConfig, inputs: int, sampled: int) -> float:
    """Operations of one forward pass of a sequence with `inputs` tokens and `sampled` positions at the head.

    Recorded steps depend on it: micro-batches are numbered by it.
    """
    count = parameters(policy)
    idle = count.experts * (1.0 - policy.top_k / policy.experts) if policy.experts else 0.0
    outside = policy.vocab * policy.dim * (1 if policy.tied else 2)
    body = 2.0 * (count.total - idle - outside) * inputs
    value = policy.latent.value_dim if policy.latent else policy.head_dim
    pairs = inputs * (inputs + 1) / 2
    attention = 2.0 * policy.layers * policy.heads * (policy.head_dim + value) * pairs
    return body + attention + 2.0 * policy.vocab * policy.dim * sampled


def element_bytes(config: PolicyConfig) -> int:
    """Bytes of one served weight and of one activation."""
    return {"float32": 4, "bfloat16": 2}[config.dtype]


def file_bytes(config: PolicyConfig, precision: str = "as_trained") -> int:
    """Bytes of the file of a published version, about; an adapter is in it beside all other weights.

    precision: as ``[weights] precision``.
    """
    width = {"as_trained": float(element_bytes(config)), "bf16": 2.0, "mxfp8": 1.0 + 1 / 32}[precision]
    return int(parameters(config).total * width)


def version_bytes(config: Config) -> int:
    """Bytes of the file of a version of a run, about; 0 where this machine cannot know them, because the checkpoint is
    on the trainer's."""
    try:
        return file_bytes(hugging_face.of_run(config), config.weights.precision)
    except (CheckpointError, OSError, ValueError):
        return 0
