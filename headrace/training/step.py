"""One update: a batch in, one version out, the same bits every time.

The idea: a step is a pure function of the trainer's state, the batch of a manifest and the recipe. Micro-batches are
packed and summed in a fixed order, nothing is drawn at random, and routes are replayed from the sampler (R3, arXiv
2510.11370: the selection is forced, the gate is recomputed, so the gradient still reaches the router). Groups without
advantage have no gradient: they are not computed, but they count in the divisor, the figures and the ledger.

Trade-off: one pass over each batch (single epoch, as Composer 2 does it). More passes would need a clipped ratio.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.algorithms.losses import dr_grpo_divisor, policy_gradient
from headrace.algorithms.mismatch import mismatch
from headrace.algorithms.packing import pack
from headrace.algorithms.staleness import histogram
from headrace.config import Algorithm
from headrace.policy.model import Model
from headrace.policy.moe import RoutesMissing
from headrace.training.batch import Batch, Segment
from headrace.training.guard import refusal
from headrace.training.rescore import Rescored
from headrace.training.state import TrainerState


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The figures of a StepDone or StepFailed; `failed` is the reason, empty for an update that was made.

    k1, k3, entropy and clipped are over the tokens that were computed, those of groups with an advantage.
    """

    version: int
    """What the step produced; after a failure it has the old bytes."""
    state_hash: str
    failed: str = ""
    detail: str = ""
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    reward_mean: float = 0.0
    pass_rate: float = 0.0
    trained_slots: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    staleness: Mapping[str, int] = field(default_factory=dict)
    staleness_max: int = 0
    k1: float = 0.0
    k3: float = 0.0
    max_abs_dlp: float = float("nan")
    rescored_tokens: int = 0
    exact: bool = False
    """Sampler and trainer have one fingerprint in exact mode: `max_abs_dlp` must be 0."""
    entropy: float = 0.0
    clipped: float = 0.0
    """Share of computed tokens whose importance weight was cut."""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Figures:
    """Sums over computed tokens."""

    loss: float
    trainer: Tensor
    sampler: Tensor
    entropy: float
    clipped: int


def learning_rate(algorithm: Algorithm, step: int) -> float:
    """Linear warm-up over the first steps, then constant."""
    return algorithm.learning_rate * min(1.0, (step + 1) / max(1, algorithm.warmup_steps))


def micro_batches(segments: Sequence[Segment], budget: int) -> Iterator[list[Segment]]:
    """Packed by token budget; one temperature within a micro-batch."""
    for temperature in sorted({segment.temperature for segment in segments}):
        equal = [segment for segment in segments if segment.temperature == temperature]
        for members in pack([len(segment.ids) for segment in equal], budget):
            yield [equal[index] for index in members]


def forward(model: Model, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [M] of the sampled tokens of some segments, in their order, routes replayed.

    RoutesMissing when a mixture's segment has no record of them: live routes would not be the sampler's.
    """
    bare = [segment.trajectory for segment in segments if segment.routed is None]
    if bare and model.config.experts:
        raise RoutesMissing(f"trajectory {bare[0]} carries no routed experts")
    lengths = [len(segment.ids) for segment in segments]
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    known = [segment.routed for segment in segments if segment.routed is not None]
    hidden = model(torch.cat([segment.ids for segment in segments]), lengths, torch.cat(known) if known else None)
    rows = torch.cat([segment.positions + offset for segment, offset in zip(segments, offsets, strict=True)])
    targets = torch.cat([segment.targets for segment in segments])
    logp, entropy = model.selected_logprobs(hidden[rows], targets, segments[0].temperature)
    return logp, entropy


def accumulate(
    state: TrainerState, batch: Batch, algorithm: Algorithm, micro_tokens: int, reference: Model | None = None
) -> _Figures:
    """Gradients of the whole batch's loss into the model, and what was seen on the way."""
    divisor = dr_grpo_divisor(batch.trajectories, algorithm.constant_tokens)
    wanted = [s for s in batch.segments if s.advantage != 0.0 or algorithm.kl_weight > 0.0]
    loss, entropy_sum, clipped = 0.0, 0.0, 0
    trainer: list[Tensor] = []
    sampler: list[Tensor] = []
    state.zero_grad()
    for segments in micro_batches(wanted, micro_tokens):
        logp, entropy = forward(state.model, segments)
        behaviour = torch.cat([segment.behaviour for segment in segments])
        advantage = torch.cat([torch.full((len(s.targets),), s.advantage) for s in segments])
        anchor = None
        if algorithm.kl_weight > 0.0 and reference is not None:
            with torch.no_grad():
                anchor = forward(reference, segments)[0]
        part = policy_gradient(
            logp,
            behaviour,
            advantage,
            divisor=divisor,
            clip=algorithm.tis_clip,
            weighting=algorithm.weighting,
            low=algorithm.mask_low,
            reference=anchor,
            kl_weight=algorithm.kl_weight,
        )
        torch.autograd.backward(part.loss)
        loss += float(part.loss.detach())
        entropy_sum += float(entropy.detach().double().sum())
        clipped += int(part.clipped)
        trainer.append(logp.detach())
        sampler.append(behaviour)
    empty = torch.empty(0)
    return _Figures(
        loss, torch.cat(trainer) if trainer else empty, torch.cat(sampler) if sampler else empty, entropy_sum, clipped
    )


def refuse(state: TrainerState, reason: str, detail: str) -> StepOutcome:
    """The outcome of a batch that is not trained on: the next version, with the old bytes."""
    state.zero_grad()
    state.version += 1
    return StepOutcome(version=state.version, state_hash=state.hash(), failed=reason, detail=detail)


def take(
    state: TrainerState,
    batch: Batch,
    *,
    algorithm: Algorithm,
    micro_tokens: int,
    bound: int,
    rescored: Rescored | None = None,
    exact: bool = False,
    reference: Model | None = None,
) -> StepOutcome:
    """Train on a batch: version k becomes k + 1. A refused update becomes k + 1 too, with the old bytes.

    bound: staleness that no token may exceed (Law 2): a batch that does is refused, whoever let it through.
    reference: the policy of the KL term, needed when `algorithm.kl_weight` > 0. Nothing is written outside `state`.
    """
    started = time.perf_counter()
    ages = histogram(state.version, batch.versions())
    oldest = max(map(int, ages), default=0)
    if oldest > bound:
        return refuse(state, "too_stale", f"a token is {oldest} versions old, the bound is {bound}")
    rate = learning_rate(algorithm, state.step)
    figures = accumulate(state, batch, algorithm, micro_tokens, reference)
    norm = state.gradient_norm()
    seen = mismatch(figures.trainer, figures.sampler)
    reason = refusal(figures.loss, norm, seen.k1, max_gradient_norm=algorithm.max_grad_norm, max_k1=algorithm.max_k1)
    if reason:
        state.zero_grad()
    elif seen.tokens:
        state.apply(rate, min(1.0, algorithm.grad_clip / norm) if norm > 0.0 else 1.0)
    state.version += 1
    return StepOutcome(
        version=state.version,
        state_hash=state.hash(),
        failed=reason,
        detail=f"loss {figures.loss:.4g}, gradient norm {norm:.4g}, k1 {seen.k1:.4g}" if reason else "",
        loss=figures.loss,
        grad_norm=norm,
        learning_rate=rate,
        reward_mean=sum(batch.rewards) / batch.trajectories,
        pass_rate=batch.passed / batch.trajectories,
        trained_slots=0 if reason else batch.trajectories,
        tokens=batch.tokens,
        computed_tokens=seen.tokens,
        staleness=ages,
        staleness_max=oldest,
        k1=seen.k1,
        k3=seen.k3,
        max_abs_dlp=rescored.max_abs_dlp if rescored else float("nan"),
        rescored_tokens=rescored.tokens if rescored else 0,
        exact=exact,
        entropy=figures.entropy / seen.tokens if seen.tokens else 0.0,
        clipped=figures.clipped / seen.tokens if seen.tokens else 0.0,
        seconds=time.perf_counter() - started,
    )
