"""Counts of the parameters of `policy.model.Model`, and operations, in closed form: no allocation, no import
of torch."""

import math
from functools import cache
from typing import NamedTuple

from headrace.config import Config
from headrace.policy.adapters import shape
from headrace.policy.config import CheckpointError, PolicyConfig
from headrace.policy.layout import hugging_face

MOMENTS = {"float32": 4, "bfloat16": 2, "eight_bit": 1}
"""Bytes of an element of a moment."""
POSITION = 32
"""Bytes of a recorded position without its routes."""
PACKED = 1.06
"""Bytes of packed routes over the entropy of uniform choices."""
INLINE = 1 << 20
"""Bytes above which a record becomes a claim check (`bus.storing.MAX_INLINE`)."""


class Parameters(NamedTuple):
    """Counts of elements."""

    total: int
    experts: int
    """In mixtures, without shared experts."""


@cache
def parameters(config: PolicyConfig) -> Parameters:
    """Numbers of elements of the parameters of a policy."""
    if config.counted is not None:
        whole, experts = config.counted
        return Parameters(whole + (shape.parameters(config) if config.adapter else 0), experts)
    layers = sum(_layer(config, index) for index in range(config.layers))
    outside = config.vocab * config.dim * (1 if config.tied else 2) + config.dim
    experts = 3 * config.experts * config.expert_dim * config.dim * config.sparse_layers
    return Parameters(layers + outside + shape.parameters(config), experts)


def _layer(c: PolicyConfig, index: int) -> int:
    """Number of elements of a layer's parameters."""
    count = 2 * c.dim  # norms
    if c.latent:
        low, width = c.latent, c.heads * (c.latent.nope_dim + c.latent.rope_dim)
        count += low.q_rank * (c.dim + width + 1) if low.q_rank else width * c.dim
        count += (low.kv_rank + low.rope_dim) * c.dim + low.kv_rank
        count += c.heads * (low.nope_dim + low.value_dim) * low.kv_rank + c.dim * c.heads * low.value_dim
    else:
        count += (2 * c.heads + 2 * c.kv_heads) * c.head_dim * c.dim
        count += (2 * c.head_dim if c.qk_norm else 0) + (c.dim if c.out_bias else 0)
        count += (c.heads + 2 * c.kv_heads) * c.head_dim if c.qkv_bias else 0
    if not c.sparse(index):
        return count + 3 * (c.dense_dim or c.expert_dim) * c.dim
    count += c.experts * c.dim + 3 * (c.experts + c.shared_experts) * c.expert_dim * c.dim
    return count + (c.experts if c.scores == "sigmoid" else 0)


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


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint of a run: masters, moments and changed weights of earlier versions, about."""
    policy = hugging_face.of_run(config)
    trained = shape.parameters(policy) if policy.adapter else parameters(policy).total
    return trained * (4 + 2 * MOMENTS[config.algorithm.moments]) + trained * element_bytes(policy)


def step_bytes(config: Config) -> int:
    """Bytes of the records of a step whose attempts fill their context, in all streams."""
    return sum(_of_attempt(config).values()) * config.curriculum.groups_per_step * config.curriculum.group_size


def record_bytes(config: Config) -> dict[str, int]:
    """Stream to the bytes of the records of all kept steps, whose attempts fill their context. With `replay.keep_gib`
    together at most these."""
    attempts = config.curriculum.groups_per_step * config.curriculum.group_size
    least = config.curriculum.staleness + 2
    steps = min(config.curriculum.steps, max(config.replay.keep_steps, least)) + least  # those that are not trained yet
    whole = step_bytes(config)
    if whole and config.replay.keep_gib:
        steps = min(steps, max(2 * least, int(config.replay.keep_gib * 2**30 / whole) + least))
    return {name: size * attempts * steps for name, size in _of_attempt(config).items()}


def _of_attempt(config: Config) -> dict[str, int]:
    """Stream to the bytes of an attempt that fills its context: its Trajectory, and its turns, which have the routes.
    What is larger than a claim check allows lies in HR_BLOB."""
    policy, limits = hugging_face.of_run(config), config.limits
    routes = 0.0
    if policy.experts and config.engine.kind == "embedded":
        routes = policy.sparse_layers * policy.top_k * (1 if policy.experts <= 255 else 2)
    elif policy.experts:  # sets of experts (policy/routes.py)
        routes = policy.sparse_layers * math.log2(math.comb(policy.experts, policy.top_k)) / 8 * PACKED
    sizes = {"HR_TRAJ": 0, "HR_TURN": 0, "HR_BLOB": 0}
    whole, turn = limits.context_tokens * POSITION, limits.context_tokens * (POSITION + routes)
    sizes["HR_BLOB" if whole > INLINE else "HR_TRAJ"] += whole
    sizes["HR_BLOB" if turn / limits.max_turns > INLINE else "HR_TURN"] += int(turn)
    return sizes
