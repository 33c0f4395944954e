"""How far each engine is from the trainer, measured on the same weights: the first signal of a broken run.

The idea: k1 and k3 over a batch mix rounding with learning, because the policy has moved since it sampled. Here a
sample of trajectories is scored again span by span with the very weights that wrote them (see `rescore`), so whatever
remains is arithmetic: another machine, another engine, a bug. Figures are kept per engine and per fingerprint: one bad
engine among ten must not drown in a mean, and one of another fingerprint is named even when its numbers look well.

flips are found by routing live: in exact mode that is what re-scoring does anyway, elsewhere it costs a second pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.algorithms.mismatch import flipped, mismatch
from headrace.config import Algorithm, Numerics
from headrace.messages.rollout import Trajectory
from headrace.messages.training import EngineMismatch
from headrace.policy import scoring
from headrace.policy.model import Model
from headrace.training.batch import Batch, Segment
from headrace.training.rescore import Rescored, drawn


class TooFar(Exception):
    """An engine is above a limit at which the step is refused; the text says which and by how much."""


class Measured(NamedTuple):
    """What a step knows about its samplers."""

    rescored: Rescored = Rescored(math.nan, 0)
    engines: tuple[EngineMismatch, ...] = ()
    """In order of engine and fingerprint."""

    def alarm(self, limits: Numerics) -> str:
        """What somebody should hear about; empty when all is well."""
        return "; ".join(text for text in (above(self.engines, limits), strangers(self.engines)) if text)


class _Compared(NamedTuple):
    trainer: Tensor
    sampler: Tensor
    flips: int
    routed: int
    """Token-layers with a record on both sides."""


def measure(
    models: Mapping[int, Model],
    batch: Batch,
    trajectories: Iterable[Trajectory],
    sample: int,
    seed: int,
    fingerprint: str,
) -> Measured:
    """Score `sample` trajectories of a batch again. models: kept versions; fingerprint: the trainer's own.

    `policy.scoring.ScoringError` when a trajectory names a version that is not kept.
    """
    origin = {trajectory.id: (trajectory.rollout, trajectory.fingerprint) for trajectory in trajectories}
    chosen = drawn(batch, sample, seed)
    parts: dict[tuple[str, str], list[_Compared]] = {}
    for name in dict.fromkeys(segment.trajectory for segment in batch.segments):
        parts.setdefault(origin[name], [])  # an engine that was not drawn is still named
    for segment in batch.segments:
        if segment.trajectory in chosen:
            parts[origin[segment.trajectory]].append(compare(models, segment))
    engines = tuple(_engine(*key, parts[key], fingerprint) for key in sorted(parts))
    measured = [engine for engine in engines if engine.tokens]
    worst = [engine.max_abs_dlp for engine in measured]
    largest = math.nan if not worst or any(map(math.isnan, worst)) else max(worst)
    return Measured(Rescored(largest, sum(engine.tokens for engine in measured)), engines)


def compare(models: Mapping[int, Model], segment: Segment) -> _Compared:
    """One segment's sampled tokens, by trainer and by sampler, and where their routes part."""
    exact = all(model.numerics.exact for model in models.values())
    ids = torch.cat([segment.ids, segment.targets[-1:]])
    targets = (segment.positions + 1).tolist()
    live: list[Tensor] = []
    found = scoring.score(models, ids, segment.spans, targets, segment.temperature, recorder=live)
    if segment.routed is None or not live:
        return _Compared(found, segment.behaviour, 0, 0)
    if not exact:
        found = scoring.score(models, ids, segment.spans, targets, segment.temperature, segment.routed)
    flips, routed = flipped(live[0][: len(segment.routed)], segment.routed[: len(live[0])])
    return _Compared(found, segment.behaviour, flips, routed)


def _engine(name: str, mark: str, parts: Sequence[_Compared], fingerprint: str) -> EngineMismatch:
    empty = torch.empty(0)
    trainer = torch.cat([part.trainer for part in parts]) if parts else empty
    sampler = torch.cat([part.sampler for part in parts]) if parts else empty
    seen = mismatch(trainer, sampler)
    routed = sum(part.routed for part in parts)
    return EngineMismatch(
        engine=name,
        fingerprint=mark,
        same_fingerprint=mark == fingerprint,
        tokens=seen.tokens,
        k1=seen.k1,
        k3=seen.k3,
        max_abs_dlp=seen.max_abs,
        differ=seen.differ,
        flips=sum(part.flips for part in parts) / routed if routed else 0.0,
    )


def answer(measured: Measured, limits: Numerics, algorithm: Algorithm) -> Algorithm:
    """The objective of this step, after a look at the limits. TooFar when the step may not be taken.

    Masked tokens teach nothing beyond a ratio (IcePop, Ling team 2025): whatever the rest of the recipe is, a broken
    engine's outliers stay out.
    """
    said = above(measured.engines, limits)
    if not said or limits.on_mismatch == "warn":
        return algorithm
    if limits.on_mismatch in ("stop", "roll_back"):
        raise TooFar(said)
    return msgspec.structs.replace(
        algorithm, weighting="masked", tis_clip=limits.mask_ratio, mask_low=1.0 / limits.mask_ratio
    )


def above(engines: Sequence[EngineMismatch], limits: Numerics) -> str:
    """The first engine and figure above a limit, in words; empty when all keep within. A NaN is above every limit."""
    for engine in engines:
        for name in ("max_abs_dlp", "k3", "differ", "flips"):
            value, limit = getattr(engine, name), getattr(limits, f"limit_{name}")
            if limit and not value <= limit:
                return f"{name} {value:.3g} of engine {engine.engine or 'unnamed'} is above {limit:.3g}"
    return ""


def strangers(engines: Sequence[EngineMismatch]) -> str:
    """The engines whose fingerprint is not the trainer's, in words; empty when there are none."""
    other = [f"{engine.engine or 'unnamed'} ({engine.fingerprint or 'none'})" for engine in engines]
    named = [text for text, engine in zip(other, engines, strict=True) if not engine.same_fingerprint]
    return f"other numerics fingerprint than the trainer's: {', '.join(named)}" if named else ""
