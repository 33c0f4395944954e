import functools
import math
from typing import Any

import msgspec
import pytest
import torch

from headrace.messages.base import Array
from headrace.messages.rollout import Span
from headrace.policy.scoring import ScoringError, score
from headrace.policy.seam import PolicyModel
from headrace.training.batches.batch import Batch, build
from headrace.training.batches.segment import Segment
from headrace.training.mismatch import Rescored, compare, measure
from tests.support.live_memory import live_bytes
from tests.support.segments import segments_of
from tests.support.world import batch, episode, model


def models() -> dict[int, PolicyModel]:
    older, newer = model(), model()
    with torch.no_grad():
        newer.get_parameter("layers.0.qkv").mul_(1.02)
    return {0: older, 1: newer}


@functools.cache
def played(*spans: int) -> Any:
    """Manifest, trajectories and scores of one batch: records, which no test changes."""
    return batch(models(), 1, list(spans))


def rescore(models: dict[int, PolicyModel], data: Batch, sample: int, seed: int) -> Rescored:
    """As the trainer measures its batches."""
    _, trajectories, _ = played(0, 0, 1, 1)
    return measure(models, data, trajectories.values(), sample, seed, "f").rescored


def difference(models: dict[int, PolicyModel], segment: Segment) -> float:
    compared = compare(models, segment)
    return float((compared.trainer - compared.sampler).abs().max())


def made(spans: list[int]) -> Batch:
    manifest, trajectories, scores = played(*spans)
    return build(manifest.groups, trajectories, scores)


def test_the_samplers_bits_come_back_across_a_swap_in_flight() -> None:
    for spans in ([0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]):
        rescored = rescore(models(), made(spans), sample=5, seed=1)
        assert rescored == (0.0, 20)


def test_scoring_with_the_newest_weights_alone_would_not_do() -> None:
    (segment,) = segments_of(episode(models(), "g", 0, 1, [0, 0, 1, 1]))
    assert difference(models(), segment) == 0.0
    assert difference({0: models()[1], 1: models()[1]}, segment) > 0.0


def test_a_long_span_in_pieces_has_its_bits_and_needs_less_memory() -> None:
    length, draw = 1000, torch.Generator().manual_seed(5)
    ids = torch.randint(0, 300, (length + 1,), generator=draw)
    spans = [Span(0, 700, 0), Span(700, length, 1), Span(0, length, 1)]  # the last as by a successor without a cache
    targets = [*range(600, length + 1)]
    results, live = [], []
    for piece in (length, 64, 37):
        routes: list[torch.Tensor] = []

        def scored(piece: int = piece, routes: list[torch.Tensor] = routes) -> None:
            results.append((score(models(), ids, spans, targets, 1.0, recorder=routes, piece=piece), routes[0]))

        live.append(live_bytes(scored))
    for logp, routed in results[1:]:
        assert torch.equal(logp, results[0][0]) and torch.equal(routed, results[0][1])
    assert len(results[0][1]) == length
    assert max(live[1:]) < live[0] / 2, live


def test_a_wrong_record_shows() -> None:
    trajectory = episode(models(), "g", 0, 1, [0, 0, 1, 1])
    turn = trajectory.turns[1]
    lied = msgspec.structs.replace(turn, logprobs=Array.of([x + 0.25 for x in turn.logprobs.tolist()], "<f4"))
    (segment,) = segments_of(msgspec.structs.replace(trajectory, turns=(trajectory.turns[0], lied)))
    assert difference(models(), segment) == pytest.approx(0.25)


def test_the_sample_follows_the_seed() -> None:
    data = made([0, 0, 1, 1])
    lied = torch.zeros(2)
    for seed in (1, 2):
        for segment in data.segments:
            segment.behaviour.copy_(segment.behaviour)  # the same batch for both
        lied[seed - 1] = rescore(models(), data, sample=3, seed=seed).tokens
    assert lied.tolist() == [12, 12]
    data.segments[4].behaviour.sub_(1.0)
    versions = models()
    seen = [rescore(versions, data, sample=3, seed=seed).max_abs_dlp > 0.5 for seed in range(30)]
    assert 0 < sum(seen) < 30
    assert seen == [rescore(versions, data, sample=3, seed=seed).max_abs_dlp > 0.5 for seed in range(30)]


def test_nothing_to_score_is_not_a_zero() -> None:
    rescored = rescore(models(), made([0, 0, 1, 1]), sample=0, seed=1)
    assert math.isnan(rescored.max_abs_dlp)
    assert rescored.tokens == 0


def test_a_version_that_is_not_kept_is_an_error() -> None:
    with pytest.raises(ScoringError, match="version 0"):
        rescore({1: models()[1]}, made([0, 0, 1, 1]), sample=1, seed=1)
