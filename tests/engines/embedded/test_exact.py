"""Law 5 on a real engine: the weights that wrote each span give the sampler's log-probabilities again, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.numerics import policy as study
from headrace.config import Policy
from headrace.engines.base import SampleRequest
from headrace.messages.rollout import Sampling, Span
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.policy.scoring import ScoringError, score
from tests.support import tiny
from tests.support.engines import LATEST, Versions, assert_equal, play

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        (1, "float32"),
        (1, "bfloat16"),
        *(pytest.param(batch, dtype, marks=pytest.mark.slow) for batch, dtype in ((4, "float32"), (4, "bfloat16"))),
        pytest.param(16, "float32", marks=pytest.mark.slow),  # fewer ways of computing than in bfloat16
        (16, "bfloat16"),
    ],
)
async def test_turns_with_swaps_in_flight(tmp_path: Path, dtype: Dtype, batch: int) -> None:
    versions = Versions(tiny.config(dtype), tmp_path)
    records, stats = await play(versions, batch, swaps=True)
    assert_equal(versions, records)
    assert sum(record.swapped_turns for record in records) > 0
    assert sum(record.capped for record in records) > 0
    assert len({span.version for record in records for span in record.spans}) > 2
    assert stats["running"] == stats["waiting"] == stats["sessions"] == 0


POLICIES: dict[str, Callable[[Dtype], PolicyConfig]] = {
    "even": tiny.config,
    "bundled": lambda dtype: hugging_face.from_section(Policy(dtype=dtype)),
    "study": study,
    "smollm2": lambda dtype: PolicyConfig(
        dim=576, layers=2, heads=9, kv_heads=3, head_dim=64, experts=0, top_k=0, expert_dim=1536, vocab=49152,
        tied=True, dtype=dtype,
    ),
}  # fmt: skip
"""The demo's policy, a mixture, and the widths of SmolLM2."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("threads", [(1, 2), (2, 1)], ids=["1-2", "2-1"])
@pytest.mark.parametrize(
    ("name", "dtype", "batch"),
    [
        ("even", "bfloat16", 3),
        *(
            pytest.param(name, dtype, batch, marks=pytest.mark.slow)
            for name in ("bundled", "study", "smollm2")
            for dtype in ("bfloat16", "float32")
            for batch in (1, 8, 64)
        ),
    ],
)
async def test_a_sampler_and_a_trainer_with_other_threads(
    name: str, dtype: Dtype, batch: int, threads: tuple[int, int], tmp_path: Path
) -> None:
    """threads: of torch while the engine samples, and while its record is scored."""
    before = torch.get_num_threads()
    versions = Versions(POLICIES[name](dtype), tmp_path)
    try:
        torch.set_num_threads(threads[0])
        records, _ = await play(versions, batch, swaps=True)
        torch.set_num_threads(threads[1])
        assert_equal(versions, records)
    finally:
        torch.set_num_threads(before)
    assert sum(record.swapped_turns for record in records) > 0


async def test_chunked_prefill_and_odd_widths(tmp_path: Path) -> None:
    versions = Versions(tiny.odd(), tmp_path)
    records, _ = await play(versions, 8, swaps=True, prefill=23)
    assert_equal(versions, records)
    assert any(record.spans[0].end < 100 for record in records), "a swap between two chunks of a prompt"


async def test_shared_prefixes_are_reused_and_lose_nothing(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path)
    records, stats = await play(versions, 8, swaps=False)
    assert_equal(versions, records)
    fresh = sum(len(record.ids) - 1 for record in records)
    assert stats["forwarded"] == fresh - 3 * 64, "three of four sessions take the block of the shared prompt"
    for record in records:
        assert record.spans[0].start == 0
        assert torch.equal(record.score(versions, record.routed()), torch.tensor(record.logprobs)), "routes of all rows"


async def test_a_small_cache_evicts_and_forwards_again(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path)
    records, stats = await play(versions, 8, swaps=True, turns=4, blocks=18)
    assert stats["evicted"] > 0
    assert any(sum(span.start == 0 for span in record.spans) > 1 for record in records), "reported again from 0"
    assert_equal(versions, records)


async def test_eviction_looks_at_no_session_without_blocks(tmp_path: Path) -> None:
    """A product has thousands of open sessions, and the cache holds blocks of a few."""
    versions = Versions(tiny.config(), tmp_path)
    engine = versions.engine(cache_blocks=6)
    await versions.load(engine, 0)
    for number in range(30):
        ids = tuple(tiny.tokens(versions.config, 60, seed=number).tolist())
        sampling = Sampling(max_turn_tokens=8)
        await engine.sample(
            SampleRequest(session=f"s{number}", ids=ids, policy=LATEST, sampling=sampling, stop_ids=(), seed=1)
        )
        recent = [*engine._worker.recent]
        assert recent == [f"s{earlier}" for earlier in range(number + 1)][-len(recent) :], "in the order of their use"
        assert 0 < len(recent) <= 6
    assert engine.stats()["sessions"] == 30 and engine.stats()["evicted"] >= 24
    assert engine.stats()["cache_bytes"] == 6 * engine._worker.store.cache.block_bytes
    await engine.close("s29")
    assert [*engine._worker.recent] == recent[:-1]
    await engine.stop()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
async def test_ordinary_arithmetic_is_close_and_not_equal(tmp_path: Path, dtype: Dtype) -> None:
    """bfloat16 rounds so coarsely that a tiny model may come out equal by luck: there only closeness is asked."""
    versions = Versions(tiny.config(dtype), tmp_path, exact=False)
    records, _ = await play(versions, 8, swaps=True)
    scored = torch.cat([record.score(versions, record.routed()) for record in records])
    want = torch.cat([torch.tensor(record.logprobs) for record in records])
    assert dtype == "bfloat16" or float((scored != want).float().mean()) > 0.1
    assert float((scored - want).abs().max()) < (1e-3 if dtype == "float32" else 1.0)


async def test_the_record_matters(tmp_path: Path) -> None:
    """Scoring with other spans than those recorded is not equal: the test above can fail."""
    versions = Versions(tiny.config(), tmp_path)
    records, _ = await play(versions, 4, swaps=True)
    record = next(record for record in records if record.swapped_turns)
    newest = versions.model(record.spans[-1].version)
    with torch.no_grad():
        ids = torch.tensor(record.ids[:-1])
        at = torch.tensor(record.targets)
        wrong, _ = newest.selected_logprobs(
            newest(ids, [len(ids)])[at - 1], torch.tensor(record.ids)[at], record.temperature
        )
    assert not torch.equal(wrong, torch.tensor(record.logprobs))


def test_records_that_cannot_be_scored() -> None:
    model = tiny.model(tiny.config())
    with pytest.raises(ScoringError, match="no weights for version 7"):
        score({1: model}, [1, 2, 3], [Span(0, 2, 7)], [2], 1.0)
    with pytest.raises(ScoringError, match="positions 1 to 2 without a forward"):
        score({1: model}, [1, 2, 3, 4], [Span(0, 1, 1), Span(2, 3, 1)], [3], 1.0)
    with pytest.raises(ScoringError, match="spans end at 2"):
        score({1: model}, [1, 2, 3, 4], [Span(0, 2, 1)], [3], 1.0)
    assert len(score({1: model}, [1, 2, 3], [Span(0, 2, 1)], [], 1.0)) == 0
