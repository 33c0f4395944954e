"""The division of a trainer's work and state over devices, of which `training.memory_plan` counts the bytes. Without
torch."""

import math
from typing import Literal, NamedTuple

from headrace.config import Config
from headrace.config.episodes import Limits
from headrace.policy.config import PolicyConfig

Moments = Literal["float32", "bfloat16", "eight_bit"]
MOMENTS: dict[Moments, int] = {"float32": 4, "bfloat16": 2, "eight_bit": 1}
"""Formats of `algorithm.moments` to the bytes of an element, without scales."""


class Layout(NamedTuple):
    """The division of the work over devices, and the copies that are held."""

    devices: int = 1
    """Devices that share one copy of parameters, masters, moments and gradients (FSDP)."""
    context: int = 1
    """Devices that share the tokens of a sequence (context parallelism); it divides `devices`."""
    tokens: int = 8192
    """Most inputs of a micro-batch of several sequences (`trainer.micro_tokens`)."""
    longest: int = 0
    """Inputs of the longest sequence: a longer one than `tokens` is a micro-batch of its own."""
    recompute: bool = False
    """Only the inputs of layers are kept; backward recomputes the other activations, one layer at a time."""
    moment_bytes: int = 4
    """Bytes of an element of one of AdamW's two moments: 4, 2, or 1 besides its scale (`algorithm.moments`)."""
    expert_ranks: int = 1
    """Devices that share one copy of a mixture's experts, each with some of them; 1 shards experts like all other
    weights."""
    rescore: bool = True
    """Trajectories are scored again (`trainer.rescore`)."""
    versions: int = 1
    """Largest number of earlier versions that re-scoring rebuilds: the staleness bound, 0 without re-scoring."""
    learning_rate: float = 0.0
    """It decides how many served weights an update changes (`changed_share`); 0: all."""
    minibatches: int = 1
    """Updates of a batch."""
    reference: bool = False
    """A reference policy for the KL term."""
    rounded: bool = False
    """A float32 policy that is served as bfloat16: its masters are not its weights."""
    snapshots: int = 0
    """Copies of masters and moments: 2 with the guard, 1 more with several minibatches."""
    exact: bool = True
    """Exact mode, in which attention keeps no copies."""
    cpu: bool = False
    """The device is a CPU."""
    offload: bool = False
    """Masters and moments are in the host's memory."""
    copies: int = 1
    """Copies of all parameters, masters and moments, on `devices` each (HSDP)."""
    nodes: int = 1
    """Machines with an equal share of all devices."""
    skew: float = 1.0
    """Rows of the busiest experts, as a multiple of balanced routing's rows."""

    @property
    def inputs(self) -> int:
        """Inputs of the largest micro-batch."""
        return max(self.tokens, self.longest)

    @property
    def sharded(self) -> bool:
        """Whether several processes hold the state."""
        return self.devices * self.copies > 1

    @property
    def local(self) -> int:
        """Devices of one machine."""
        return self.devices * self.copies // self.nodes


def divided(policy: PolicyConfig, shard: int, owners: int) -> bool:
    """Whether `owners` of a mixture's experts can have equal runs of them, and the processes of `shard` that share a
    run equal parts of it: whole experts, or rows of them where they are too few."""
    if not policy.experts or policy.experts % owners:
        return False
    each, parts = policy.experts // owners, shard // owners
    return all(each * rows % parts == 0 for rows in (2 * policy.expert_dim, policy.dim))


def changed_share(policy: PolicyConfig, learning_rate: float) -> float:
    """Share of the served weights that an update changes: all in float32 and of adapters.

    Of bfloat16 weights those whose spacing of numbers the update reaches: AdamW moves a weight by about the learning
    rate. Weights are taken as normally distributed with the deviation of new ones, dim^-0.5.
    """
    if policy.dtype == "float32" or policy.adapter is not None or not learning_rate:
        return 1.0
    deviation, share = policy.dim**-0.5, 0.0

    def below(value: float) -> float:
        return math.erf(value / deviation / math.sqrt(2.0))

    for exponent in range(-40, 3):  # weights from 2^exponent to twice as much are 2^(exponent - 7) apart
        share += (below(2.0 ** (exponent + 1)) - below(2.0**exponent)) * min(1.0, learning_rate / 2.0 ** (exponent - 7))
    return min(1.0, share)


def settings(layout: Layout) -> dict[str, str | int | bool]:
    """The configuration keys that give this layout."""
    return {
        "trainer.mesh.shard": layout.devices,
        **({"trainer.mesh.replicate": layout.copies} if layout.copies > 1 else {}),
        **({"trainer.node_ranks": layout.local} if layout.nodes > 1 else {}),
        "trainer.micro_tokens": layout.tokens,
        "trainer.mesh.context": layout.context,
        **({"trainer.mesh.expert": layout.expert_ranks} if layout.expert_ranks > 1 else {}),
        "numerics.recompute": layout.recompute,
        "algorithm.moments": next(name for name, each in MOMENTS.items() if each == layout.moment_bytes),
        "trainer.offload": "optimizer" if layout.offload else "none",
    }


def longest(config: Config) -> int:
    """Most inputs of a sequence that a trainer gets, in tokens.

    Without `limits.reserve_tokens` a context ends behind its limit: behind the turn that reaches it and the summary.
    The results of that turn's calls come on top. A branch's sequences are sessions of users.
    """

    def most(limits: Limits) -> int:
        return limits.context_tokens + (0 if limits.reserve_tokens else 2 * limits.max_turn_tokens)

    if config.feedback.base:
        return most(config.production.limits)
    return most(config.limits)


def layout_of(config: Config) -> Layout:
    """The layout of the trainer actor under a configuration."""
    algorithm, numerics = config.algorithm, config.numerics
    guarded = algorithm.guard_k1 > 0.0 or numerics.on_mismatch == "roll_back"
    return Layout(
        devices=config.trainer.mesh.shard,
        copies=config.trainer.mesh.replicate,
        nodes=config.trainer.nodes,
        context=config.trainer.mesh.context,
        tokens=config.trainer.micro_tokens,
        longest=longest(config),
        expert_ranks=config.trainer.mesh.expert,
        learning_rate=algorithm.learning_rate,
        minibatches=algorithm.minibatches,
        recompute=numerics.recompute,
        moment_bytes=MOMENTS[algorithm.moments],
        rescore=config.trainer.rescore > 0,
        versions=config.curriculum.staleness if config.trainer.rescore else 0,
        reference=algorithm.kl_weight > 0.0,
        rounded=config.weights.precision == "bf16",
        snapshots=(2 if guarded else 0) + (1 if algorithm.minibatches > 1 else 0),
        exact=config.engine.exact,
        cpu=not config.trainer.device.startswith("cuda"),
        offload=config.trainer.offload == "optimizer" and config.trainer.device != "cpu",
    )
