"""The order of micro-batches: those of a round take about equal time, for any number of processes."""

import random
import statistics
from collections.abc import Sequence

import pytest
import torch

from headrace.policy.config import PolicyConfig
from headrace.training.batches.micro_batch import flops, micro_batches
from headrace.training.batches.segment import Segment

QWEN3 = PolicyConfig(
    dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, experts=0, top_k=0, expert_dim=3072, vocab=151936,
    tied=True,
)  # fmt: skip
"""The shape of Qwen3-0.6B."""


def segment(length: int, temperature: float = 1.0) -> Segment:
    sampled = max(1, length // 4)
    return Segment(
        trajectory="t",
        ids=torch.zeros(length, dtype=torch.int64),
        positions=torch.arange(length - sampled, length),
        targets=torch.zeros(sampled, dtype=torch.int64),
        behaviour=torch.zeros(sampled),
        versions=torch.zeros(sampled, dtype=torch.int64),
        routed=None,
        spans=(),
        advantage=1.0,
        temperature=temperature,
    )


def skewed(seed: int, longest: int = 65536) -> list[Segment]:
    """256 sequences with a median of 3,000 tokens; a few have as many as a micro-batch may hold."""
    draw = random.Random(seed)
    return [segment(min(longest, max(64, int(draw.lognormvariate(8.0, 1.3))))) for _ in range(256)]


def slowest(parts: Sequence[Sequence[Segment]], ranks: int) -> list[float]:
    """For each round of `ranks` micro-batches, the most predicted operations over the mean."""
    costs = [flops(QWEN3, part) for part in parts]
    rounds = [costs[first : first + ranks] for first in range(0, len(costs), ranks)]
    return [max(each) / statistics.fmean(each) for each in rounds]


@pytest.mark.parametrize(
    ("ranks", "most"),
    [(2, 1.10), (4, 1.19)],  # in the order of indices 1.25 to 1.29 and 1.54 to 1.78
)
def test_neighbours_take_about_equal_time(ranks: int, most: float) -> None:
    for seed in (1, 2, 3):
        segments = skewed(seed)
        parts = micro_batches(segments, 65536, QWEN3)
        assert statistics.fmean(slowest(parts, ranks)) <= most
        # The time of all rounds over that of an even division; a last round that is not full has the fastest ones.
        costs = [flops(QWEN3, part) for part in parts]
        assert sum(costs[::ranks]) / (sum(costs) / ranks) < 1.0 + 0.12 * (ranks - 1)
        assert sorted(id(s) for part in parts for s in part) == sorted(id(s) for s in segments), "nothing is lost"


def test_equal_tokens_are_ordered_by_their_attention() -> None:
    """Four short sequences take less time than one of as many tokens."""
    short, long = [segment(1024) for _ in range(4)], segment(4096)
    parts = micro_batches([*short, long], 4096, QWEN3)
    assert [len(part) for part in parts] == [1, 4]


def test_equal_operations_keep_the_order_of_indices_and_temperatures() -> None:
    segments = [segment(100, temperature) for temperature in (1.0, 0.5, 1.0, 0.5)]
    parts = micro_batches(segments, 100, QWEN3)
    assert [id(part[0]) for part in parts] == [id(segments[index]) for index in (1, 3, 0, 2)]
    assert all(len({s.temperature for s in part}) == 1 for part in micro_batches(segments, 1000, QWEN3))
