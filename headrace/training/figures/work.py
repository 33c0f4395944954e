"""The work of a step, predicted from the policy's shape: tokens, floating-point operations, the load of experts.

A product of an [n, a] and an [a, b] matrix counts 2nab; everything else counts nothing. Causal attention counts the
pairs that it looks at. The embedding is a look-up, and the head multiplies the positions with a sampled token alone.
The backward pass counts twice the forward pass; with adapters once, because the fixed weights have no gradient.

Model operations (MFU) are those of one forward and one backward pass of the trained segments. Hardware operations (HFU)
add re-scoring, the proximal policy, the reference policy and the forward passes that `recompute` repeats.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.config import Config
from headrace.policy.config import PolicyConfig
from headrace.policy.moe import widen
from headrace.training.batches.batch import Batch
from headrace.training.batches.micro_batch import flops
from headrace.training.batches.segment import Segment
from headrace.training.gradient import computed
from headrace.training.mismatch import drawn


class Work(NamedTuple):
    """The computation of a step, on all processes together."""

    trained_tokens: int = 0
    """Sampled tokens with a gradient."""
    forwarded_tokens: int = 0
    """Inputs of every forward pass, but not those that `recompute` repeats."""
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    expert_load: float = 0.0
    """Routed rows of the busiest expert over those of the mean one, of the worst layer; 0 without a mixture."""


def work_of(config: Config, policy: PolicyConfig, batch: Batch, seed: int, exact: bool) -> Work:
    """The work of a batch's step. seed: the manifest's, which draws the trajectories that are scored again; exact: the
    trainer's numerics are exact."""
    trained = computed(batch, config.algorithm)
    chosen = drawn(batch, config.trainer.rescore, seed)
    again = [segment for segment in batch.segments if segment.trajectory in chosen]
    twice = [segment for segment in again if segment.routed is not None and not exact]  # live and replayed routes
    passes = (config.algorithm.minibatches > 1) + (config.algorithm.kl_weight > 0.0)
    forward = flops(policy, trained)
    model = (2.0 if policy.adapter else 3.0) * forward
    extra = flops(policy, again) + flops(policy, twice) + passes * forward
    inputs = _inputs(trained)
    return Work(
        trained_tokens=sum(len(segment.targets) for segment in trained),
        forwarded_tokens=(1 + passes) * inputs + _inputs(again) + _inputs(twice),
        model_flops=model,
        hardware_flops=model + extra + (forward if config.numerics.recompute else 0.0),
        expert_load=expert_load(policy, batch.segments),
    )


def thread(threads: int) -> ThreadPoolExecutor:
    """A thread for `work_of` beside a step's gradient: before it, the load of the experts would delay the forward pass.
    Ask for its result before the update, so that an error leaves the weights as they are. threads: of torch, as in the
    thread that trains."""
    return ThreadPoolExecutor(1, thread_name_prefix="work", initializer=torch.set_num_threads, initargs=(threads,))


def _inputs(segments: Sequence[Segment]) -> int:
    return sum(len(segment.ids) for segment in segments)


def expert_load(policy: PolicyConfig, segments: Sequence[Segment]) -> float:
    """As `Work.expert_load`, from the recorded routes."""
    counts = [rows for rows in expert_rows(policy, segments).tolist() if any(rows)]
    return max((max(rows) * policy.experts / sum(rows) for rows in counts), default=0.0)


def expert_rows(policy: PolicyConfig, segments: Sequence[Segment]) -> Tensor:
    """int64 [layers with a mixture, experts]: the rows that the recorded routes of all positions give each expert. No
    layer where the policy has no mixture, or no segment has routes."""
    routed = [segment.routed for segment in segments if segment.routed is not None and policy.experts]
    counts = torch.zeros(routed[0].shape[1] if routed else 0, policy.experts, dtype=torch.int64)
    for layer, of_layer in enumerate(counts):
        rows = torch.cat([widen(routes[:, layer : layer + 1], 1, routes.shape[2]).flatten() for routes in routed])
        of_layer.copy_(torch.bincount(rows[rows >= 0], minlength=policy.experts))
    return counts
