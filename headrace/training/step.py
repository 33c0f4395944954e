"""One update: a batch in, one version out, the same bits every time.

The idea: a step is a pure function of the trainer's state, the batch of a manifest and the recipe. Micro-batches are
packed and summed in a fixed order, nothing is drawn at random, and routes are replayed from the sampler (R3, arXiv
2510.11370: the selection is forced, the gate is recomputed, so the gradient still reaches the router). Groups without
advantage have no gradient: they are not computed, but they count in the divisor, the figures and the ledger.

A batch may be split into several updates (`minibatches`), in the order of its trajectories. The proximal policy of the
decoupled objective is then the trainer's own re-scored log-probabilities from before the first of them. All or nothing:
when one is refused, the ones before it are undone.

Trade-off: one pass over each batch (single epoch, as Composer 2 does it). More passes would need a clipped ratio.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headrace.algorithms.corrections import Band
from headrace.algorithms.losses import dr_grpo_divisor, policy_gradient
from headrace.algorithms.mismatch import Mismatch, mismatch
from headrace.algorithms.packing import pack
from headrace.algorithms.staleness import histogram
from headrace.config import Algorithm
from headrace.messages.training import EngineMismatch
from headrace.policy.model import Model
from headrace.policy.moe import RoutesMissing
from headrace.training.batch import Batch, Segment
from headrace.training.guard import Copy, Guard, Reading, refusal
from headrace.training.rescore import Rescored
from headrace.training.state import TrainerState

T = TypeVar("T")


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
    restored: int = -1
    """The earlier version whose bytes and optimizer these are, after a rollback."""
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
    engines: tuple[EngineMismatch, ...] = ()
    alarm: str = ""
    """As in StepDone."""


class _Figures(NamedTuple):
    """Sums over computed tokens, of a micro-batch or of many."""

    loss: float
    trainer: Tensor
    sampler: Tensor
    entropy: float
    clipped: int


class Crew(Protocol):
    """Who computes the micro-batches of a batch: one process, or several that share them (`training.distributed`)."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        """What `work` gave for each of 0 .. count - 1, in this order, in every process.

        False tells `work` to take part in the collectives and to teach nothing: others have work, this one has none.
        """


class _Alone:
    """One process."""

    def each(self, count: int, work: Callable[[int, bool], T]) -> list[T]:
        return [work(index, True) for index in range(count)]


ALONE: Crew = _Alone()


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


def computed(batch: Batch, algorithm: Algorithm) -> list[Segment]:
    """Segments that have a gradient."""
    return [s for s in batch.segments if s.advantage != 0.0 or algorithm.kl_weight > 0.0]


def minibatches(wanted: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Segments in so many updates, whole trajectories in their order, of nearly equal number; one if there is none."""
    names = list(dict.fromkeys(segment.trajectory for segment in wanted))
    cuts = [len(names) * part // parts for part in range(parts + 1)]
    members = [set(names[start:end]) for start, end in itertools.pairwise(cuts) if end > start]
    return [[segment for segment in wanted if segment.trajectory in part] for part in members] or [[]]


class Part(NamedTuple):
    """What one of several updates computes on."""

    wanted: Sequence[Segment]
    parts: int = 1
    """Into how many the batch is split."""
    proximal: Mapping[int, Tensor] | None = None
    """As of `proximal_logprobs`; none when the model still is as it was before the step."""


@torch.no_grad()
def proximal_logprobs(
    model: Model, wanted: Sequence[Segment], micro_tokens: int, crew: Crew = ALONE
) -> dict[int, Tensor]:
    """The trainer's own log-probabilities of some segments before the step, by the segment's `id()`."""
    parts = list(micro_batches(wanted, micro_tokens))
    found: dict[int, Tensor] = {}
    for segments, logp in zip(parts, crew.each(len(parts), lambda at, _: forward(model, parts[at])[0]), strict=True):
        own = torch.split(logp, [len(segment.targets) for segment in segments])
        found.update({id(segment): part for segment, part in zip(segments, own, strict=True)})
    return found


def accumulate(
    state: TrainerState,
    batch: Batch,
    algorithm: Algorithm,
    micro_tokens: int,
    reference: Model | None = None,
    part: Part | None = None,
    crew: Crew = ALONE,
) -> _Figures:
    """Gradients of the loss of a batch, or of one part of it, into the model, and what was seen on the way."""
    wanted, parts, proximal = part or Part(computed(batch, algorithm))
    divisor = dr_grpo_divisor(batch.trajectories, algorithm.constant_tokens) / parts
    micro = list(micro_batches(wanted, micro_tokens))
    state.zero_grad()

    def one(at: int, teaches: bool) -> _Figures:
        return _backward(state.model, micro[at], algorithm, divisor if teaches else math.inf, reference, proximal)

    found = crew.each(len(micro), one)
    empty = torch.empty(0)
    return _Figures(
        sum((seen.loss for seen in found), 0.0),
        torch.cat([seen.trainer for seen in found]) if found else empty,
        torch.cat([seen.sampler for seen in found]) if found else empty,
        sum((seen.entropy for seen in found), 0.0),
        sum(seen.clipped for seen in found),
    )


def _backward(
    model: Model,
    segments: Sequence[Segment],
    algorithm: Algorithm,
    divisor: float,
    reference: Model | None,
    proximal: Mapping[int, Tensor] | None,
) -> _Figures:
    """One micro-batch's gradient into the model."""
    logp, entropy = forward(model, segments)
    behaviour = torch.cat([segment.behaviour for segment in segments])
    advantage = torch.cat([torch.full((len(s.targets),), s.advantage) for s in segments])
    anchor = None
    if algorithm.kl_weight > 0.0 and reference is not None:
        with torch.no_grad():
            anchor = forward(reference, segments)[0]
    token_loss = policy_gradient(
        logp,
        behaviour,
        advantage,
        divisor=divisor,
        clip=algorithm.tis_clip,
        weighting=algorithm.weighting,
        low=algorithm.mask_low,
        reference=anchor,
        kl_weight=algorithm.kl_weight,
        band=Band(algorithm.ratio_low, algorithm.ratio_high),
        proximal=torch.cat([proximal[id(segment)] for segment in segments]) if proximal is not None else None,
        lengths=[len(segment.targets) for segment in segments],
    )
    torch.autograd.backward(token_loss.loss)
    measured = float(entropy.detach().double().sum())
    return _Figures(float(token_loss.loss.detach()), logp.detach(), behaviour, measured, int(token_loss.clipped))


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
    guard: Guard | None = None,
    crew: Crew = ALONE,
) -> StepOutcome:
    """Train on a batch: version k becomes k + 1. A refused update becomes k + 1 too, with the old bytes.

    bound: staleness that no token may exceed (Law 2): a batch that does is refused, whoever let it through.
    reference: the policy of the KL term, needed when `algorithm.kl_weight` > 0. guard: the run's watch, which may put
    an earlier version's bytes in place. crew: all of its processes must call this with the same arguments, and all get
    the same outcome. Nothing is written outside `state` and `guard`.
    """
    started = time.perf_counter()
    ages = histogram(state.version, batch.versions())
    oldest = max(map(int, ages), default=0)
    if oldest > bound:
        return refuse(state, "too_stale", f"a token is {oldest} versions old, the bound is {bound}")
    watch = guard if guard is not None and algorithm.guard_k1 > 0.0 else None
    gone = guard.refuses(batch.versions()) if guard is not None else ""
    if gone:
        return refuse(state, "discarded_version", gone)
    rate = learning_rate(algorithm, state.step) * (watch.factor if watch is not None else 1.0)
    reward = sum(batch.rewards) / batch.trajectories
    made = _updates(state, batch, algorithm, micro_tokens, rate, reference, watch, reward, bound, crew)
    state.version += 1
    return StepOutcome(
        version=state.version,
        state_hash=state.hash(),
        failed=made.reason,
        detail=made.detail,
        restored=made.restored,
        loss=made.loss,
        grad_norm=made.norm,
        learning_rate=rate,
        reward_mean=reward,
        pass_rate=batch.passed / batch.trajectories,
        trained_slots=0 if made.reason else batch.trajectories,
        tokens=batch.tokens,
        computed_tokens=made.seen.tokens,
        staleness=ages,
        staleness_max=oldest,
        k1=made.seen.k1,
        k3=made.seen.k3,
        max_abs_dlp=rescored.max_abs_dlp if rescored else float("nan"),
        rescored_tokens=rescored.tokens if rescored else 0,
        exact=exact,
        entropy=made.entropy / made.seen.tokens if made.seen.tokens else 0.0,
        clipped=made.clipped / made.seen.tokens if made.seen.tokens else 0.0,
        seconds=time.perf_counter() - started,
    )


class _Updates(NamedTuple):
    """What became of a batch's updates."""

    reason: str
    detail: str
    restored: int
    loss: float
    norm: float
    seen: Mismatch
    entropy: float
    clipped: int


def _updates(
    state: TrainerState,
    batch: Batch,
    algorithm: Algorithm,
    micro_tokens: int,
    rate: float,
    reference: Model | None,
    watch: Guard | None,
    reward: float,
    bound: int,
    crew: Crew,
) -> _Updates:
    """All updates of a batch, or none: what is refused leaves the bytes of before, what collapses those of earlier."""
    wanted = computed(batch, algorithm)
    parts = minibatches(wanted, algorithm.minibatches)
    proximal: dict[int, Tensor] | None = None
    undo: Copy | None = None
    if len(parts) > 1:
        proximal, undo = proximal_logprobs(state.model, wanted, micro_tokens, crew), Copy.of(state)
    reason = detail = ""
    restored, seen = -1, mismatch(torch.empty(0), torch.empty(0))
    done: list[tuple[_Figures, float]] = []
    for number, part in enumerate(parts):
        figures = accumulate(state, batch, algorithm, micro_tokens, reference, Part(part, len(parts), proximal), crew)
        norm = state.gradient_norm()
        now = mismatch(figures.trainer, figures.sampler)
        done.append((figures, norm))
        if not number:
            seen = now if proximal is None else _before(wanted, proximal)
        limits = {"max_gradient_norm": algorithm.max_grad_norm, "max_k1": algorithm.max_k1}
        reason = refusal(figures.loss, norm, seen.k1 if not number else now.k1, **limits)
        if watch is not None and not number and reason in ("", "mismatch_too_large") and seen.tokens:
            reading = Reading(seen.k1, reward, figures.entropy / max(1, now.tokens))
            why = watch.look(state, reading, algorithm, bound)
            if why:
                reason, restored = "collapse", watch.roll_back(state, algorithm)
                detail = f"{why}; {f'back to version {restored}' if restored >= 0 else 'no good version is held yet'}"
        if reason:
            state.zero_grad()
            if number and undo is not None:
                undo.restore(state)
            break
        if now.tokens:
            state.apply(rate, min(1.0, algorithm.grad_clip / norm) if norm > 0.0 else 1.0)
    loss, norm = sum(figures.loss for figures, _ in done) / len(done), max(norm for _, norm in done)
    if reason and not detail:
        detail = f"loss {done[-1][0].loss:.4g}, gradient norm {done[-1][1]:.4g}, k1 {seen.k1:.4g}"
    entropy = sum(figures.entropy for figures, _ in done)
    return _Updates(reason, detail, restored, loss, norm, seen, entropy, sum(figures.clipped for figures, _ in done))


def _before(wanted: Sequence[Segment], proximal: Mapping[int, Tensor]) -> Mismatch:
    """How far the model of before the step was from the samplers."""
    own = torch.cat([proximal[id(segment)] for segment in wanted])
    return mismatch(own, torch.cat([segment.behaviour for segment in wanted]))
