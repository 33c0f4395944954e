"""The gradient of a batch, or of a part of it, and the sums that a step reports with it.

Micro-batches are packed and summed in a fixed order, nothing is random, and routes are replayed from the
sampler (R3, arXiv 2510.11370: the selection is forced, the gate is recomputed, so the gradient still reaches the
router). After each micro-batch the state adds its gradient to float32 sums, whatever the dtype of the weights.

Sums stay on the device until the end of the part: the host waits for the device once, not three times per micro-batch.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.algorithms.corrections import Band, Correction, SampledTokens
from headrace.algorithms.losses import Objective, batch_divisor, policy_gradient
from headrace.config import Algorithm
from headrace.policy.seam import PolicyModel
from headrace.training.batches.batch import Batch
from headrace.training.batches.micro_batch import MicroBatch, device_of, forward, micro_batches
from headrace.training.batches.segment import Segment
from headrace.training.parallel.interface import SINGLE_PROCESS, DataParallel
from headrace.training.state import TrainerState


def nothing() -> None:
    """Does nothing."""


def in_order(*calls: Callable[[], object]) -> Callable[[], None]:
    """A function that makes these calls one after the other."""

    def together() -> None:
        for call in calls:
            call()

    return together


class Recipe(NamedTuple):
    """The settings that decide a step's bits, besides the state and the batch."""

    algorithm: Algorithm
    micro_tokens: int
    """Largest number of inputs of a micro-batch; a longer segment is a micro-batch of its own."""
    bound: int = 0
    """Largest staleness of a token, in versions (Law 2)."""

    def packed(self, model: PolicyModel, segments: Sequence[Segment]) -> list[list[Segment]]:
        """The micro-batches of some segments."""
        return micro_batches(segments, self.micro_tokens, model.config)


class Helpers(NamedTuple):
    """Parts of a step besides its own state."""

    reference: PolicyModel | None = None
    """The policy of the KL term, needed when `algorithm.kl_weight` > 0."""
    data_parallel: DataParallel = SINGLE_PROCESS
    before_forward: Callable[[], None] = nothing
    """Called before every forward pass."""
    before_update: Callable[[], None] = nothing
    """Called when the gradient of the first update is computed, before the state is changed."""
    hashed: bool = True
    """Whether the outcome has the state hash; without it, it is computed when the version is published."""


class GradientPart(NamedTuple):
    """The segments of one of several updates."""

    segments: Sequence[Segment]
    parts: int = 1
    """Number of updates that the batch is split into."""
    proximal: Mapping[int, Tensor] | None = None
    """As `proximal_logprobs` returns them; None when the batch is one update, which needs no proximal policy."""


class Gradient(NamedTuple):
    """Sums over the computed tokens of a part."""

    loss: float
    trainer: Tensor
    """float32 [M], on the CPU: log-probabilities by the trainer."""
    sampler: Tensor
    """float32 [M], on the CPU."""
    entropy: float
    clipped: int
    dual_clipped: int
    metrics: Mapping[str, float] = {}
    """The loss's own."""


class _Sums(NamedTuple):
    """As `Gradient`, for one micro-batch and on the device: sums are 0-dim tensors."""

    loss: Tensor
    trainer: Tensor
    sampler: Tensor
    entropy: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    metrics: dict[str, Tensor]


def in_loss(batch: Batch, algorithm: Algorithm) -> list[Segment]:
    """Segments that the loss and its divisor count: all of them, or with `overlong` = mask those of attempts that no
    limit of length ended. Advantages are those of the whole group either way."""
    return [s for s in batch.segments if not (s.cut_off and algorithm.overlong == "mask")]


def computed(batch: Batch, algorithm: Algorithm) -> list[Segment]:
    """Segments that have a gradient: those of the loss with an advantage, or all of these with a KL term."""
    return [s for s in in_loss(batch, algorithm) if s.trained or algorithm.kl_weight > 0.0]


def minibatches(segments: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Segments of each update: whole trajectories in their order, in about equal numbers; without any, one empty
    update."""
    names = list(dict.fromkeys(segment.trajectory for segment in segments))
    cuts = [len(names) * part // parts for part in range(parts + 1)]
    members = [set(names[start:end]) for start, end in itertools.pairwise(cuts) if end > start]
    return [[segment for segment in segments if segment.trajectory in part] for part in members] or [[]]


@torch.no_grad()
def proximal_logprobs(
    model: PolicyModel, segments: Sequence[Segment], recipe: Recipe, helpers: Helpers | None = None
) -> dict[int, Tensor]:
    """The trainer's log-probabilities of some segments before the step: `Segment.index` to float32 [M] on the CPU."""
    helpers = helpers or Helpers()
    members = recipe.packed(model, segments)

    def one(at: int, _: bool) -> Tensor:
        micro = MicroBatch.of(members[at], device_of(model))
        helpers.before_forward()
        return forward(model, micro)[0].cpu()

    out: dict[int, Tensor] = {}
    for part, logp in zip(members, helpers.data_parallel.each(len(members), one, Tensor), strict=True):
        pieces = torch.split(logp, [len(segment.targets) for segment in part])
        out.update({segment.index: piece for segment, piece in zip(part, pieces, strict=True)})
    return out


def accumulate(
    state: TrainerState, batch: Batch, recipe: Recipe, part: GradientPart | None = None, helpers: Helpers | None = None
) -> Gradient:
    """Add the gradient of a batch's loss, or of one part of it, to the state."""
    helpers = helpers or Helpers()
    part = part or GradientPart(computed(batch, recipe.algorithm))
    objective = _objective(recipe.algorithm, batch, part.parts)
    members = recipe.packed(state.model, part.segments)
    device = device_of(state.model)
    state.zero_grad()

    def one(at: int, contributes: bool) -> _Sums:
        micro = MicroBatch.of(members[at], device)
        helpers.before_forward()
        objective_here = objective if contributes else objective._replace(divisor=math.inf)
        sums = _backward(state.model, micro, objective_here, part.proximal, helpers.reference)
        state.collect_gradients()
        return sums

    return _total(helpers.data_parallel.each(len(members), one, _Sums))


def _objective(algorithm: Algorithm, batch: Batch, parts: int) -> Objective:
    band = Band(algorithm.ratio_low, algorithm.ratio_high)
    counted = in_loss(batch, algorithm)
    if algorithm.sequence_mean:
        divisor = float(max(1, len(counted)))
    else:
        masked = {s.trajectory for s in batch.segments} - {s.trajectory for s in counted}
        tokens = sum(len(segment.targets) for segment in counted)
        divisor = batch_divisor(max(1, batch.trajectories - len(masked)), algorithm.constant_tokens, tokens)
    options = algorithm.options.loss
    return Objective(
        Correction(
            algorithm.weighting, algorithm.tis_clip, 1.0 / algorithm.tis_clip, band, algorithm.dual_clip, options
        ),
        algorithm.kl_weight,
        algorithm.kl,
        algorithm.sequence_mean,
        divisor / parts,
    )


def _backward(
    model: PolicyModel,
    micro: MicroBatch,
    objective: Objective,
    proximal: Mapping[int, Tensor] | None,
    other: PolicyModel | None,
) -> _Sums:
    """Add one micro-batch's gradient to the model's. other: the reference policy of the KL term."""
    logp, entropy = forward(model, micro)
    reference = None
    if objective.kl_weight > 0.0 and other is not None:
        with torch.no_grad():
            reference = forward(other, micro)[0]
    before = None
    if proximal is not None:
        before = torch.cat([proximal[segment.index] for segment in micro.segments]).to(logp.device)
    tokens = SampledTokens(logp, micro.behaviour, micro.advantage, before, reference, micro.sampled)
    token_loss = policy_gradient(tokens, objective)
    torch.autograd.backward(token_loss.loss)
    total = entropy.detach().double().sum()
    sums = token_loss.clipped, token_loss.dual_clipped, dict(token_loss.metrics)
    return _Sums(token_loss.loss.detach(), logp.detach(), micro.behaviour, total, *sums)


def _total(parts: Sequence[_Sums]) -> Gradient:
    """The sums of all micro-batches in their order, copied to the CPU at once."""
    if not parts:
        return Gradient(0.0, torch.empty(0), torch.empty(0), 0.0, 0, 0)
    names = ("loss", "entropy", "clipped", "dual_clipped")
    columns = [torch.stack([getattr(sums, name).double() for sums in parts]) for name in names]
    names_of_loss = list(dict.fromkeys(name for sums in parts for name in sums.metrics))
    absent = columns[0].new_zeros(())
    columns += [torch.stack([sums.metrics.get(name, absent) for sums in parts]) for name in names_of_loss]
    losses, entropies, clipped, dual_clipped, *metrics = torch.stack(columns).cpu().tolist()
    return Gradient(
        sum(losses, 0.0),
        torch.cat([sums.trainer for sums in parts]).cpu(),
        torch.cat([sums.sampler for sums in parts]).cpu(),
        sum(entropies, 0.0),
        int(sum(clipped)),
        int(sum(dual_clipped)),
        {name: sum(values) for name, values in zip(names_of_loss, metrics, strict=True)},
    )
