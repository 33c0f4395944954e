"""The client of the production engine against a double that copies the measured quirks: turns, swaps, guards, losses.

What is proven here is the client's bookkeeping. That a real SGLang behaves so is test_sglang_real's to show.
"""

import asyncio
import copy
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from headrace.engines.base import Engine, EngineError, Progress
from headrace.engines.server.engine import OneServer
from headrace.engines.server.weights.lock import NotServed
from headrace.messages.rollout import PolicyRef, Span
from headrace.policy import moe
from tests.support import tiny
from tests.support.engines import Record, Versions, request
from tests.support.sglang.double import Double
from tests.support.sglang.requests import attached, begun

pytestmark = pytest.mark.anyio

Pair = tuple[OneServer, Double]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tiny.config(), tmp_path_factory.mktemp("versions"), exact=False)


@pytest.fixture
async def pair(versions: Versions, tmp_path: Path) -> AsyncIterator[Pair]:
    async with attached(versions, tmp_path) as made:
        yield made


def close(record: Record, versions: Versions) -> bool:
    """Whether the sampler's log-probabilities are those of the versions that the spans name, KV carried along."""
    scored = record.score(versions).tolist()
    return bool(max(abs(a - b) for a, b in zip(scored, record.logprobs, strict=True)) < 1e-4)


async def test_it_is_an_engine(pair: Pair, versions: Versions) -> None:
    engine: Engine = pair[0]
    assert engine.version == 0 and engine.fingerprint.startswith("sglang-")
    sample = await engine.sample(request())
    assert len(sample.ids) == 8 and sample.stop == "length"
    assert sample.spans == (Span(0, 10, 0),)
    assert sample.routed is not None and sample.routed.dtype == "|u1" and sample.routed.shape == (10, 2, 2)
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in sample.logprobs)
    stopped = await engine.sample(request("t", stops=tuple(range(0, 320, 2)), tokens=64))
    assert stopped.stop == "stop" and stopped.ids[-1] % 2 == 0 and not [id for id in stopped.ids[:-1] if id % 2 == 0]


async def test_a_second_turn_reports_new_rows_only_and_finds_its_prefix_cached(pair: Pair, versions: Versions) -> None:
    engine, double = pair
    record = Record(temperature=1.0)
    for more in ([5, 6, 7, 8], [9] * 3, []):
        sample = await engine.sample(request(ids=(*record.ids, *more)))
        record.add(more, sample, versions.config)
    assert [asked["routed_experts_start_len"] for asked in double.bodies("/generate")] == [0, 11, 22]
    assert engine.counts["cached"] == 11 + 22
    assert {asked["cache_salt"] for asked in double.bodies("/generate")} == {f"0-{versions.files[0][1][:16]}"}
    assert close(record, versions)
    rows = record.routed()[: len(record.ids) - 1]
    assert (rows >= 0).all(), "every forwarded position has its routes"
    live = record.score(versions)
    assert (live - record.score(versions, routed=rows)).abs().max() < 1e-4, "and they are the right ones"


async def test_a_swap_in_place_goes_on_with_the_old_keys_and_says_which_token_is_whose(
    pair: Pair, versions: Versions
) -> None:
    engine, double = pair
    record = Record(temperature=1.0)
    await double.let_go(hold_at=5)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2, 3, 4), tokens=12)))
    await double.until(lambda: any(len(active.out) == 5 for active in double.running))
    await begun(engine)
    swap = await engine.load(1, *versions.files[1])
    assert (swap.version, swap.state_hash, engine.version) == (1, versions.files[1][1], 1)
    assert engine.stats()["checked"] and engine.counts["taken_back"] == 0
    await double.let_go()
    sample = await work
    # Five tokens came from forwards of positions 0..7 by version 0; the sixth from position 8.
    assert sample.spans == (Span(0, 8, 0), Span(8, 15, 1))
    record.add([1, 2, 3, 4], sample, versions.config)
    again = await engine.sample(request(ids=(*record.ids, 9)))
    assert again.spans == (Span(0, 24, 1),), (
        "old keys are not reused: the whole context is forwarded and reported again"
    )
    record.add([9], again, versions.config)
    assert close(record, versions)
    third = await engine.sample(request(ids=(*record.ids, 9)))
    assert third.spans == (Span(24, 33, 1),)
    assert [body["mode"] for body in double.bodies("/pause_generation")] == ["in_place"] * 2
    assert not any(body["flush_cache"] for body in double.bodies("/update_weights_from_disk"))


async def test_a_version_with_other_bits_samples_its_turn_again(pair: Pair, versions: Versions) -> None:
    """A trainer that repeats a step may give its version other bits, and a span names the version alone."""
    engine, double = pair
    earlier = await engine.sample(request("earlier", ids=(1, 2, 3, 4)))
    await double.let_go(hold_at=5)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2, 3, 4), tokens=12)))
    await double.until(lambda: any(len(active.out) == 5 for active in double.running))
    await begun(engine)
    await engine.load(0, *versions.files[1])
    await double.let_go()
    sample = await work
    assert sample.spans == (Span(0, 15, 0),) and engine.counts["redrawn"] == engine.counts["taken_back"] == 1
    record, replacing = Record(temperature=1.0), copy.copy(versions)
    replacing.models = versions.models[1:]
    record.add([1, 2, 3, 4], sample, versions.config)
    assert close(record, replacing) and not close(record, versions)
    again = await engine.sample(request("earlier", ids=(1, 2, 3, 4, *earlier.ids, 9)))
    assert again.spans == (Span(0, 20, 0),), "an earlier session's context is forwarded again"


async def test_abort_and_resume_keeps_what_was_sampled(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, swap="abort") as (engine, double):
        await double.let_go(hold_at=5)
        work = asyncio.create_task(engine.sample(request(ids=(1, 2, 3, 4), tokens=12)))
        await double.until(lambda: any(len(active.out) == 5 for active in double.running))
        partial = list(double.running[0].out)
        await engine.load(1, *versions.files[1])
        await double.let_go()
        sample = await work
        assert list(sample.ids[:5]) == partial and len(sample.ids) == 12
        assert sample.spans == (Span(0, 8, 0), Span(0, 15, 1)), "old keys are not reused"
        assert sample.routed is not None and sample.routed.shape[0] == 15 and sample.routed_start is UNSET
        record = Record(temperature=1.0)
        record.add([1, 2, 3, 4], sample, versions.config)
        assert close(record, versions)
        first, second = double.bodies("/generate")
        assert second["input_ids"] == [1, 2, 3, 4, *partial] and second["sampling_params"]["max_new_tokens"] == 7
        assert second["routed_experts_start_len"] == 8 and second["cache_salt"] != first["cache_salt"]
        again = await engine.sample(request(ids=(*record.ids, 9)))
        assert again.spans == (Span(15, 24, 1),), "the new weights forwarded the whole prefix"
        record.add([9], again, versions.config)
        assert engine.counts["cached"] == 15 and close(record, versions)


async def test_what_nobody_began_to_compute_is_taken_back_before_a_pause(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, running=1) as (engine, double):
        await double.let_go(hold_at=2)
        works = [asyncio.create_task(engine.sample(request(f"s{i}", ids=(i + 1, 2)))) for i in range(2)]
        await double.until(lambda: len(double.queue) == 1 and any(len(active.out) == 2 for active in double.running))
        await begun(engine)
        await engine.load(1, *versions.files[1])
        await double.let_go()
        samples = await asyncio.gather(*works)
        assert engine.counts["taken_back"] == 1 and engine.counts["redrawn"] == 0
        assert sorted(len(sample.spans) for sample in samples) == [1, 2]


async def test_a_prompt_that_was_forwarded_on_the_other_side_of_a_swap_is_drawn_again(
    versions: Versions, tmp_path: Path
) -> None:
    async with attached(versions, tmp_path, running=1) as (engine, double):
        await double.let_go(hold_at=2)
        works = [asyncio.create_task(engine.sample(request(f"s{i}", ids=(i + 1, 2)))) for i in range(2)]
        await double.until(lambda: len(double.queue) == 1 and any(len(active.out) == 2 for active in double.running))
        await begun(engine)
        queued = double.queue.pop()  # the abort does not find it: it left the queue a moment before
        await engine.load(1, *versions.files[1])
        double.queue.append(queued)
        await double.let_go()
        samples = await asyncio.gather(*works)
        assert engine.counts["redrawn"] == 1
        assert [sample.spans[-1].version for sample in samples] == [1, 1]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(ids=(1, 320)), "token id 320 is outside the vocabulary of 320"),
        (request(ids=(-1,)), "token id -1 is outside"),
        (request(stops=(5, 400)), "stop id 400 is outside"),
        (request(ids=()), "no tokens"),
        (msgspec.structs.replace(request(), routed=3), "expected routes of 0 to 2 leading positions, got 3"),
        (request(tokens=0), "expected max_turn_tokens >= 1"),
        (request(temperature=math.inf), "expected a finite temperature"),
        (request(ids=(1,) * 2045), "exceed 2048 positions"),
        (request(policy=PolicyRef(kind="scripted", name="oracle")), "no scripted policy"),
        (request(policy=PolicyRef(kind="pinned", version=3)), "version 3 is not pinned"),
    ],
)
async def test_what_would_end_a_server_never_reaches_it(pair: Pair, bad: object, words: str) -> None:
    engine, double = pair
    with pytest.raises(EngineError, match=words):
        await engine.sample(bad)  # type: ignore[arg-type]
    assert not double.bodies("/generate")


async def test_a_reply_without_routed_experts_is_an_error(pair: Pair) -> None:
    engine, double = pair
    double.drop_routes = True
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        await engine.sample(request())


@pytest.mark.parametrize("how", ["refuse", "half", "lie"])
async def test_a_failed_update_reloads_the_old_version_and_never_resumes_half_of_it(
    pair: Pair, versions: Versions, how: str
) -> None:
    engine, double = pair
    double.fail_updates = [how]
    await double.let_go(hold_at=3)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2))))
    await double.until(lambda: any(len(active.out) == 3 for active in double.running))
    await begun(engine)
    with pytest.raises(EngineError, match="version 1 was refused, the one before serves on"):
        await engine.load(1, *versions.files[1])
    assert engine.version == 0 and not double.paused and engine.stats()["reloads"] == 1
    await double.let_go()
    sample = await work
    assert {span.version for span in sample.spans} == {0}
    record = Record(temperature=1.0)
    record.add([1, 2], sample, versions.config)
    assert close(record, versions)
    await engine.load(1, *versions.files[1])
    assert engine.version == 1


async def test_a_server_that_can_load_neither_stays_paused_until_one_can_be_loaded(
    pair: Pair, versions: Versions
) -> None:
    engine, double = pair
    double.fail_updates = ["half", "refuse"]
    with pytest.raises(NotServed, match="neither version 0 nor its successor"):
        await engine.load(1, *versions.files[1])
    assert double.paused and engine.version == 0
    sample = await engine.sample(request())
    assert not double.paused and {span.version for span in sample.spans} == {0}


async def test_other_bits_than_the_manifest_promises_are_refused_before_anybody_is_paused(
    pair: Pair, versions: Versions
) -> None:
    engine, double = pair
    pauses = len(double.bodies("/pause_generation"))
    with pytest.raises(EngineError, match="has state hash"):
        await engine.load(1, versions.files[1][0], versions.files[2][1])
    with pytest.raises(EngineError, match="cannot be staged"):
        await engine.load(1, "/no/such/file", versions.files[2][1])
    assert len(double.bodies("/pause_generation")) == pauses and engine.version == 0
    assert {span.version for span in (await engine.sample(request())).spans} == {0}


async def test_a_turn_outlives_the_server_that_began_it(pair: Pair, versions: Versions) -> None:
    engine, double = pair
    await versions.load(engine, 2)
    await double.let_go(hold_at=3)
    works = [asyncio.create_task(engine.sample(request(f"s{i}", ids=(1, 2, i)))) for i in range(3)]
    await double.until(lambda: sum(len(active.out) == 3 for active in double.running) == 3)
    await double.die()
    await double.let_go()
    await double.start()
    samples = await asyncio.gather(*works)
    assert all(len(sample.ids) == 8 and sample.spans == (Span(0, 10, 2),) for sample in samples)
    assert engine.counts["lost"] == 3 and double.version.startswith("2-")


async def test_weights_that_nobody_here_loaded_are_an_error_and_loaded_over(pair: Pair, versions: Versions) -> None:
    engine, double = pair
    double.version = "somebody's"
    with pytest.raises(EngineError, match="somebody's"):
        await engine.sample(request())
    sample = await engine.sample(request())
    assert {span.version for span in sample.spans} == {0}


async def test_past_its_deadline_a_turn_comes_back_with_what_it_has(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, deadline_s=0.3) as (engine, double):
        await double.let_go(hold_at=4)
        sample = await engine.sample(request())
        assert sample.stop == "abort" and len(sample.ids) == 4
        assert sample.routed is not None and sample.routed.shape[0] == 6 and sample.spans == (Span(0, 6, 0),)
        assert not double.running


async def test_a_cancelled_turn_is_freed_on_the_server_at_once(pair: Pair) -> None:
    engine, double = pair
    await double.let_go(hold_at=4)
    work = asyncio.create_task(engine.sample(request()))
    await double.until(lambda: any(len(active.out) == 4 for active in double.running))
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await double.until(lambda: not double.running)
    rids = [body["rid"] for body in double.bodies("/abort_request")]
    assert [len(rid) for rid in rids] == [32] and rids == [body["rid"] for body in double.bodies("/generate")]


async def test_the_ids_of_a_turn_are_followed_as_the_server_sends_them(pair: Pair) -> None:
    engine, double = pair
    await double.let_go(hold_at=4)
    progress = Progress(followed=True)
    work = asyncio.create_task(engine.sample(msgspec.structs.replace(request(), progress=progress)))
    await double.until(lambda: any(len(active.out) == 4 for active in double.running))
    while len(early := await progress.news()) < 4:
        pass
    await double.let_go()
    sample = await work
    assert early == list(sample.ids[:4]) and progress.ids == list(sample.ids)


async def test_a_cut_turn_ends_with_its_tokens(pair: Pair) -> None:
    engine, double = pair
    await double.let_go(hold_at=4)
    progress = Progress(followed=False)
    work = asyncio.create_task(engine.sample(msgspec.structs.replace(request(), progress=progress)))
    await double.until(lambda: any(len(active.out) == 4 for active in double.running))
    progress.cut()
    await double.until(lambda: not double.running)
    sample = await work
    assert sample.stop == "abort" and len(sample.ids) == len(sample.logprobs) == 4


async def test_a_pinned_version_has_the_server_to_itself_and_then_the_latest_again(
    pair: Pair, versions: Versions
) -> None:
    engine, double = pair
    await versions.load(engine, 1)
    await engine.pin(0, *versions.files[0])
    pinned = PolicyRef(kind="pinned", version=0)
    await double.let_go(hold_at=2)
    works = [
        asyncio.create_task(engine.sample(request(f"s{i}", ids=(1, i + 2), policy=pinned if i % 2 else PolicyRef())))
        for i in range(4)
    ]
    await double.until(lambda: len(double.running) == 1 and len(double.running[0].out) == 2)
    await double.let_go()
    samples = await asyncio.gather(*works)
    assert [{span.version for span in sample.spans} for sample in samples] == [{1}, {0}, {1}, {0}]
    assert engine.version == 1
    await engine.unpin(0)
    with pytest.raises(EngineError, match="not pinned"):
        await engine.sample(request(policy=pinned))


async def test_a_pinned_version_finds_no_prefix_that_went_on_under_another(pair: Pair, versions: Versions) -> None:
    engine, double = pair
    await double.let_go(hold_at=5)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2, 3, 4), tokens=12)))
    await double.until(lambda: any(len(active.out) == 5 for active in double.running))
    await begun(engine)
    await engine.load(1, *versions.files[1])
    await double.let_go()
    first = await work
    await engine.pin(0, *versions.files[0])
    context = [1, 2, 3, 4, *first.ids]
    sample = await engine.sample(request("other", ids=tuple(context), policy=PolicyRef(kind="pinned", version=0)))
    record = Record(temperature=1.0)
    record.add(context, sample, versions.config)
    assert sample.spans == (Span(0, len(context) + 7, 0),) and close(record, versions)


async def test_a_version_with_other_bits_replaces_the_served_and_the_pinned_one(pair: Pair, versions: Versions) -> None:
    """A trainer that repeats a step may publish its version again."""
    engine, double = pair
    pinned = PolicyRef(kind="pinned", version=7)
    files = versions.files
    context: tuple[int, ...] = (1, 2, 3)
    for bits in (1, 2):
        await engine.load(6, *files[bits])
        await engine.pin(7, *files[bits])
        sample = await engine.sample(request(ids=context))
        assert sample.spans == (Span(0, len(context) + 7, 6),), "the keys of other bits are not reused"
        assert double.version == f"6-{files[bits][1][:16]}"
        assert (await engine.sample(request("p", policy=pinned))).spans == (Span(0, 10, 7),)
        assert double.version == f"7-{files[bits][1][:16]}"
        context = (*context, *sample.ids)
    pauses = len(double.bodies("/pause_generation"))
    await engine.sample(request())
    swap = await engine.load(6, *files[2])
    assert swap.pause_ms == 0 and len(double.bodies("/pause_generation")) == pauses + 1, "it serves already"


async def test_routes_that_a_retraction_overwrote_count_as_not_recorded(pair: Pair, versions: Versions) -> None:
    engine, double = pair
    await double.let_go(hold_at=4)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2, 3), tokens=8)))
    await double.until(lambda: any(len(active.out) == 4 for active in double.running))
    await begun(engine)
    double.retract()
    await engine.load(1, *versions.files[1])
    await double.let_go()
    sample = await work
    assert sample.spans == (Span(0, 6, 0), Span(6, 10, 1)) and engine.counts["retracted"] == 1
    rows = moe.from_array(sample.routed, versions.config.layers, versions.config.top_k)
    assert (rows[:6] == -1).all() and (rows[6:] >= 0).all()
    assert np.isfinite(sample.logprobs).all()


async def test_a_stopped_engine_says_so(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path) as (engine, _):
        await engine.stop()
        with pytest.raises(EngineError, match="was stopped"):
            await engine.sample(request())
        assert not (tmp_path / "stage").exists()
