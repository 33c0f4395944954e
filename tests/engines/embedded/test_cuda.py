"""Exact mode on a GPU: what the engine records is what re-scoring, a packed forward and a trainer's step compute."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.config import Algorithm
from headrace.policy.config import PolicyConfig
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment
from headrace.training.gradient import Recipe
from headrace.training.mismatch import compare
from headrace.training.served.versions import Versions as Kept
from headrace.training.state import TrainerState
from headrace.training.step import take
from tests.support import tiny
from tests.support.engines import Record, Versions, assert_equal, play
from tests.training.test_device import POLICIES

pytestmark = pytest.mark.gpu

SHAPES: dict[str, PolicyConfig] = {
    "dense": tiny.config(experts=0, top_k=0),
    "mixture": tiny.config(),
    "odd widths": tiny.odd(),
    "mxfp8": tiny.config(expert_format="mxfp8"),
    "nvfp4": tiny.config(expert_format="nvfp4"),
    "latent": msgspec.structs.replace(POLICIES["latent"], vocab=320),
}
CASES = [(name, dtype) for name in SHAPES for dtype in ("float32", "bfloat16") if (name, dtype) != ("nvfp4", "float32")]


def shape(name: str, dtype: str) -> PolicyConfig:
    return msgspec.structs.replace(SHAPES[name], dtype=dtype)


def assert_packed(versions: Versions, records: list[Record]) -> None:
    """All records in one packed forward of the trainer's model."""
    model = versions.model(0)
    inputs = [record.ids[:-1] for record in records]
    lengths = [len(ids) for ids in inputs]
    with torch.no_grad():
        hidden = model(torch.tensor([token for ids in inputs for token in ids], device=versions.device), lengths)
    for record, part in zip(records, torch.split(hidden, lengths), strict=True):
        at = torch.tensor(record.targets, device=versions.device)
        targets = torch.tensor(record.ids, device=versions.device)[at]
        logp, _ = model.selected_logprobs(part[at - 1], targets, record.temperature)
        assert torch.equal(logp.detach().cpu(), torch.tensor(record.logprobs))


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_turns_with_swaps_in_flight(tmp_path: Path, name: str, dtype: str, batch: int) -> None:
    versions = Versions(shape(name, dtype), tmp_path, device="cuda")
    records, _ = asyncio.run(play(versions, batch, swaps=True))
    assert_equal(versions, records)
    assert sum(record.swapped_turns for record in records) > 0


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_chunked_prefill_shared_prefixes_and_a_packed_forward(tmp_path: Path, name: str, dtype: str) -> None:
    versions = Versions(shape(name, dtype), tmp_path, device="cuda")
    records, stats = asyncio.run(play(versions, 8, swaps=False, prefill=23))
    assert stats["reused"] > 0
    assert_equal(versions, records)
    assert_packed(versions, records)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_draw_does_not_depend_on_the_batch(tmp_path: Path, name: str, dtype: str) -> None:
    versions = Versions(shape(name, dtype), tmp_path, device="cuda")
    together, _ = asyncio.run(play(versions, 8, swaps=False))
    chunks, _ = asyncio.run(play(versions, 8, swaps=False, prefill=7))
    assert [record.ids for record in together] == [record.ids for record in chunks]
    assert [record.logprobs for record in together] == [record.logprobs for record in chunks]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_step_trains_on_the_bits_that_were_sampled(tmp_path: Path, name: str, dtype: str) -> None:
    config = shape(name, dtype)
    versions = Versions(config, tmp_path, device="cuda")
    records, _ = asyncio.run(play(versions, 4, swaps=False))
    segments = []
    for index, record in enumerate(records):
        at = torch.tensor(record.targets)
        ids = torch.tensor(record.ids)
        segments.append(
            Segment(
                trajectory=f"t{index}",
                ids=ids[:-1],
                positions=at - 1,
                targets=ids[at],
                behaviour=torch.tensor(record.logprobs),
                versions=torch.zeros_like(at),
                routed=record.routed()[:-1] if config.experts else None,
                spans=tuple(record.spans),
                advantage=0.5 - index % 2,
                temperature=record.temperature,
                index=index,
            )
        )
    model = versions.model(0)
    state = TrainerState(model)
    state.new_log()
    kept = Kept(model, 0)
    for segment in segments:
        compared = compare(kept, segment)
        assert torch.equal(compared.trainer, compared.sampler) and compared.flips == 0
    data = Batch(tuple(segments), len(segments), (1.0, 0.0, 1.0, 0.0), 2, ("g",), frozenset({"f"}))
    outcome = take(state, data, Recipe(Algorithm(learning_rate=1e-3), 512, bound=1))
    assert not outcome.failed, outcome.detail
    assert outcome.grad_norm > 0.0
    assert outcome.k1 == outcome.k3 == 0.0, "the forward with gradients has the sampler's bits"
    kept.advance(state.version, state.new_log())
    for segment in segments:  # by the undo log of the update
        assert torch.equal(compare(kept, segment).trainer, segment.behaviour)
