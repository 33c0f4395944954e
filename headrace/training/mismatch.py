"""The mismatch of each engine, measured on the same weights (Law 5): the earliest sign that a run is broken.

The idea: k1 and k3 over a batch mix rounding with learning, because the policy has moved since it sampled. Here a
sample of trajectories is scored again, span by span, with the weights that wrote them. A sampled token depends on the
weights that forwarded each position before it (the KV cache is carried across a swap), so each span is scored by the
version that the sampler used there. The remaining difference is arithmetic: another machine, another engine, or a bug.
In exact mode every log-probability must have the sampler's bits.

Figures are kept per engine and per fingerprint: a mean over ten engines would hide one bad engine, and an engine with
another fingerprint is named even when its figures are good.

Flips are counted by routing live: in exact mode re-scoring does that anyway; elsewhere it costs a second pass.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.algorithms.mismatch import flipped, mismatch
from headrace.config import Algorithm, Numerics
from headrace.errors import HeadraceError
from headrace.messages.base import Array
from headrace.messages.rollout import Trajectory
from headrace.messages.training import EngineMismatch, TokenGap
from headrace.policy import scoring
from headrace.policy.seam import PolicyModel
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment

GAPS_KEPT = 4096
"""Tokens of a re-scored trajectory whose gaps are recorded one by one."""


class TooFar(HeadraceError):
    """An engine exceeds a limit at which the step is refused; the text names the engine, the figure and the limit."""


class Rescored(NamedTuple):
    """Largest |sampler - trainer| over `tokens` re-scored tokens; NaN when none was."""

    max_abs_dlp: float
    tokens: int


class Measured(NamedTuple):
    """The mismatch of a step's samplers."""

    rescored: Rescored = Rescored(math.nan, 0)
    engines: tuple[EngineMismatch, ...] = ()
    """In order of engine and fingerprint."""
    gaps: tuple[TokenGap, ...] = ()
    """Of each re-scored trajectory, in the order of the batch."""

    def alarm(self, limits: Numerics) -> str:
        """A text that names an exceeded limit, with engines of other fingerprints; empty where no limit is exceeded: a
        server's arithmetic always has another name than the trainer's."""
        said = above(self.engines, limits)
        return "; ".join(text for text in (said, strangers(self.engines)) if text) if said else ""


class Compared(NamedTuple):
    """Log-probabilities float32 [M] of one segment's sampled tokens, and the routes that differ."""

    trainer: Tensor
    sampler: Tensor
    flips: int
    routed: int
    """Token-layers with a record on both sides."""


def measure(
    models: Mapping[int, PolicyModel],
    batch: Batch,
    trajectories: Iterable[Trajectory],
    sample: int,
    seed: int,
    fingerprint: str,
) -> Measured:
    """Score `sample` trajectories of a batch again, drawn by `seed`. models: the current and the kept versions;
    fingerprint: the trainer's own.

    `policy.scoring.ScoringError` when a trajectory names a version that is not kept: the staleness bound was broken.
    """
    origin = {trajectory.id: (trajectory.rollout, trajectory.fingerprint) for trajectory in trajectories}
    chosen = drawn(batch, sample, seed)
    parts: dict[tuple[str, str], list[Compared]] = {}
    by_trajectory: dict[str, list[Compared]] = {}
    for name in dict.fromkeys(segment.trajectory for segment in batch.segments):
        parts.setdefault(origin[name], [])  # engines without a drawn trajectory are reported too
    for segment in batch.segments:
        if segment.trajectory in chosen:
            compared = compare(models, segment)
            parts[origin[segment.trajectory]].append(compared)
            by_trajectory.setdefault(segment.trajectory, []).append(compared)
    engines = tuple(_engine(*key, parts[key], fingerprint) for key in sorted(parts))
    measured = [engine for engine in engines if engine.tokens]
    worst = [engine.max_abs_dlp for engine in measured]
    largest = math.nan if not worst or any(map(math.isnan, worst)) else max(worst)
    gaps = tuple(_gap(name, origin[name][0], compared) for name, compared in by_trajectory.items())
    return Measured(Rescored(largest, sum(engine.tokens for engine in measured)), engines, gaps)


def drawn(batch: Batch, sample: int, seed: int) -> set[str]:
    """The ids of the trajectories that are scored again: `sample` of the batch, or all of them, chosen by `seed`."""
    names = list(dict.fromkeys(segment.trajectory for segment in batch.segments))
    return set(random.Random(f"rescore-{seed}").sample(names, min(sample, len(names))))


def compare(models: Mapping[int, PolicyModel], segment: Segment) -> Compared:
    """One segment's sampled tokens, by trainer and by sampler, and how many of their routes differ.

    In exact mode the routes are computed live, which checks the record; elsewhere the recorded routes are replayed.
    """
    exact = models[max(models)].numerics.exact
    ids = torch.cat([segment.ids, segment.targets[-1:]])
    targets = (segment.positions + 1).tolist()
    live: list[Tensor] = []
    trainer = scoring.score(models, ids, segment.spans, targets, segment.temperature, recorder=live)
    routes = segment.routes
    if routes is None or not live:
        return Compared(trainer, segment.behaviour, 0, 0)
    if not exact:
        trainer = scoring.score(models, ids, segment.spans, targets, segment.temperature, routes)
    flips, routed = flipped(live[0][: len(routes)], routes[: len(live[0])])
    return Compared(trainer, segment.behaviour, flips, routed)


def _engine(name: str, mark: str, parts: Sequence[Compared], fingerprint: str) -> EngineMismatch:
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


def _gap(trajectory: str, engine: str, parts: Sequence[Compared]) -> TokenGap:
    gaps = torch.cat([(part.trainer.cpu() - part.sampler.cpu()).float() for part in parts])
    array = Array.of(gaps[:GAPS_KEPT].tolist(), "<f4") if bool((gaps != 0).any()) else None
    return TokenGap(trajectory=trajectory, engine=engine, tokens=len(gaps), gaps=array)


def answer(measured: Measured, limits: Numerics, algorithm: Algorithm) -> Algorithm:
    """The objective of this step under the limits of [numerics]. TooFar when the step may not be taken.

    `mask` leaves tokens beyond a ratio without a gradient (IcePop, Ling team 2025), whatever the rest of the recipe is,
    so a broken engine's outliers have no effect.
    """
    said = above(measured.engines, limits)
    if not said or limits.on_mismatch == "warn":
        return algorithm
    if limits.on_mismatch in ("stop", "roll_back"):
        raise TooFar(said)
    return msgspec.structs.replace(algorithm, weighting="masked", tis_clip=limits.mask_ratio)


def above(engines: Sequence[EngineMismatch], limits: Numerics) -> str:
    """A text about the first engine whose k3 is above the limit; empty when there is none. NaN is above every limit."""
    for engine in engines:
        if limits.limit_k3 and not engine.k3 <= limits.limit_k3:
            return f"k3 {engine.k3:.3g} of engine {engine.engine or 'unnamed'} is above {limits.limit_k3:.3g}"
    return ""


def strangers(engines: Sequence[EngineMismatch]) -> str:
    """A text that names the engines with another fingerprint than the trainer's; empty when there are none."""
    other = [f"{engine.engine or 'unnamed'} ({engine.fingerprint or 'none'})" for engine in engines]
    named = [text for text, engine in zip(other, engines, strict=True) if not engine.same_fingerprint]
    return f"other numerics fingerprint than the trainer's: {', '.join(named)}" if named else ""
