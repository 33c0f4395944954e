"""Law 5: a sample of trajectories scored again, span by span, with the versions that wrote them.

The idea: the trainer keeps the weights of the last `bound` versions beside its own. A sampled token depends on the
weights that forwarded each position before it (the KV is carried across a swap), so re-scoring feeds each span to the
version that the sampler used there. In exact mode every log-probability must come out with the sampler's bits; anywhere
else the largest difference is measured and published.
"""

import math
import random
from collections.abc import Mapping
from typing import NamedTuple

import torch

from headrace.policy import scoring
from headrace.policy.model import Model
from headrace.training.batch import Batch, Segment


class Rescored(NamedTuple):
    """Largest |sampler - trainer| over `tokens` re-scored tokens; NaN when none was."""

    max_abs_dlp: float
    tokens: int


def rescore(models: Mapping[int, Model], batch: Batch, sample: int, seed: int) -> Rescored:
    """Re-score `sample` trajectories, drawn by `seed`; `models` maps each kept version to its weights.

    `policy.scoring.ScoringError` when a trajectory names a version that is not kept: the staleness bound was broken.
    """
    chosen = drawn(batch, sample, seed)
    worst, tokens = math.nan, 0
    for segment in batch.segments:
        if segment.trajectory in chosen:
            found = difference(models, segment)
            tokens += len(segment.targets)
            worst = found if math.isnan(worst) or found > worst or math.isnan(found) else worst
    return Rescored(worst, tokens)


def drawn(batch: Batch, sample: int, seed: int) -> set[str]:
    """The trajectories of a batch that are scored again: up to `sample`, decided by `seed`."""
    names = list(dict.fromkeys(segment.trajectory for segment in batch.segments))
    return set(random.Random(f"rescore-{seed}").sample(names, min(sample, len(names))))


def difference(models: Mapping[int, Model], segment: Segment) -> float:
    """Largest |sampler - trainer| log-probability of one segment's sampled tokens.

    In exact mode the routes are found again, which proves them; elsewhere the recorded ones are replayed.
    """
    exact = all(model.numerics.exact for model in models.values())
    ids = torch.cat([segment.ids, segment.targets[-1:]])
    found = scoring.score(
        models,
        ids,
        segment.spans,
        (segment.positions + 1).tolist(),
        segment.temperature,
        routed=None if exact else segment.routed,
    )
    return float((found - segment.behaviour).abs().max())
