"""The embedded engine keeps the protocol: draws, stops, versions, cancellation, and every refusal in one sentence."""

import asyncio
import collections
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.engines.base import Engine, EngineError, Sample
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.engines.embedded.jobs import EngineJob
from headrace.engines.embedded.sampling import draw, uniform
from headrace.engines.embedded.staging import LoadedWeights
from headrace.engines.embedded.worker import SHARED
from headrace.messages.rollout import PolicyRef, Span
from headrace.policy import moe
from headrace.weights import tensor_state
from tests.support import tiny
from tests.support.engines import Versions, request

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tiny.config(), tmp_path_factory.mktemp("versions"))


@pytest.fixture
async def engine(versions: Versions) -> AsyncIterator[EmbeddedEngine]:
    made = versions.engine(max_batch=4)
    await versions.load(made, 0)
    yield made
    await made.stop()


async def until(engine: EmbeddedEngine, sampled: int) -> None:
    """Until so many tokens were drawn since the start: the engine answers between two steps."""
    while engine.stats()["sampled"] < sampled:
        await engine.unpin(-1)


async def test_it_is_an_engine(engine: Engine) -> None:
    sample = await engine.sample(request())
    assert len(sample.ids) == 8 and sample.stop == "length"
    assert sample.spans == (Span(0, 10, 0),)
    assert sample.routed is not None and sample.routed.dtype == "|u1" and sample.routed.shape == (10, 2, 2)
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in sample.logprobs)


async def test_a_repeat_gives_the_same_ids_whatever_the_batch(engine: EmbeddedEngine) -> None:
    alone = await engine.sample(request("alone", tokens=40))
    others = [request(f"o{i}", tuple(range(i + 1)), tokens=30 + i, seed=i) for i in range(9)]
    batch = await asyncio.gather(*(engine.sample(r) for r in (*others, request("batch", tokens=40))))
    again = await engine.sample(request("alone", tokens=40))
    assert alone.ids == batch[-1].ids == again.ids and alone.logprobs == batch[-1].logprobs == again.logprobs
    assert msgspec.msgpack.encode(alone) == msgspec.msgpack.encode(again), "a repeat reports all positions again"
    assert len({sample.ids for sample in batch}) == 10
    assert (await engine.sample(request("seed", tokens=40, seed=8))).ids != alone.ids


async def test_greedy_takes_the_best_and_scores_at_one(engine: EmbeddedEngine, versions: Versions) -> None:
    sample = await engine.sample(request(tokens=20, temperature=0.0))
    model, ids = versions.model(0), torch.tensor([1, 2, 3, *sample.ids])
    with torch.no_grad():
        hidden = model(ids, [len(ids)])[2:-1]
    assert model.logits(hidden).argmax(-1).tolist() == list(sample.ids)
    assert torch.equal(model.selected_logprobs(hidden, ids[3:])[0].detach(), torch.tensor(sample.logprobs))


async def test_a_turn_ends_at_its_stop_id_which_belongs_to_it(engine: EmbeddedEngine) -> None:
    free = await engine.sample(request("free", tokens=30))
    stop = free.ids[12]
    sample = await engine.sample(request("stopped", tokens=30, stops=(stop, 319)))
    assert sample.ids == free.ids[: free.ids.index(stop) + 1] and sample.stop == "stop"


async def test_a_capped_turn_goes_on_as_if_it_had_not_been_capped(engine: EmbeddedEngine) -> None:
    """The last token of a capped turn has no keys and values yet; the next call must forward it first."""
    whole = await engine.sample(request("whole", tokens=48))
    parts: list[Sample] = []
    ids: tuple[int, ...] = (1, 2, 3)
    for _ in range(3):
        parts.append(await engine.sample(request("parts", ids, tokens=16)))
        ids += parts[-1].ids
    assert ids[3:] == whole.ids
    assert sum((part.logprobs for part in parts), ()) == whole.logprobs
    assert [part.spans for part in parts] == [(Span(0, 18, 0),), (Span(18, 34, 0),), (Span(34, 50, 0),)]
    assert engine.stats()["forwarded"] == 50 + 50, "nothing was forwarded twice"


async def test_a_lost_answer_is_drawn_again_from_the_cache(engine: EmbeddedEngine) -> None:
    """A caller that never saw the answer repeats: same ids, and every position of its record is reported again."""
    first = await engine.sample(request(tokens=10))
    context = (1, 2, 3, *first.ids, 5, 6)
    lost = await engine.sample(request(ids=context, tokens=10))
    forwarded = engine.stats()["forwarded"]
    again = await engine.sample(request(ids=context, tokens=10))
    assert again == lost and again.spans == (Span(12, 24, 0),)
    assert engine.stats()["forwarded"] == forwarded + 10


async def test_another_past_is_noticed(engine: EmbeddedEngine) -> None:
    """A context that is not what the session saw is forwarded from where it parts; nothing stale is attended to."""
    await engine.sample(request("s", tuple(range(150)), tokens=5))
    other = (*range(100), *range(50))
    changed = await engine.sample(request("s", other, tokens=5))
    fresh = await engine.sample(request("t", other, tokens=5))
    assert changed.ids == fresh.ids and changed.logprobs == fresh.logprobs
    assert changed.spans[0].start == 0


async def test_a_swap_lands_between_two_steps(engine: EmbeddedEngine, versions: Versions) -> None:
    task = asyncio.create_task(engine.sample(request(tokens=200)))
    await until(engine, 20)
    swap = await engine.load(1, *versions.files[1])
    assert (swap.version, swap.state_hash, engine.version) == (1, versions.files[1][1], 1) and swap.pause_ms >= 0
    sample = await task
    first, second = sample.spans
    assert (first.version, second.version, second.end) == (0, 1, 202) and first.end > 20
    old = await engine.sample(request("old", tokens=200))
    cut = first.end - 3 + 1  # the token at position i was written by what forwarded i - 1
    assert old.ids != sample.ids and len(old.spans) == 1
    await versions.load(engine, 0)
    before = await engine.sample(request("before", tokens=200))
    assert before.ids[:cut] == sample.ids[:cut] and before.ids != sample.ids


async def test_weights_that_are_not_what_they_claim_are_refused(
    engine: EmbeddedEngine, versions: Versions, tmp_path: Path
) -> None:
    path, digest = versions.files[1]
    with pytest.raises(EngineError, match=f"version 5 .* has state hash {digest}, expected {'0' * 32}"):
        await engine.load(5, path, "0" * 32)
    with pytest.raises(EngineError, match="version 5 cannot be loaded"):
        await engine.load(5, str(tmp_path / "nothing"), digest)
    whole = Path(path).read_bytes()
    (tmp_path / "flipped").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EngineError, match=f"expected {digest}"):
        await engine.load(5, str(tmp_path / "flipped"), digest)
    assert engine.version == 0 and (await engine.sample(request())).spans[0].version == 0


async def test_a_pinned_version_is_served_beside_the_latest(engine: EmbeddedEngine, versions: Versions) -> None:
    await engine.pin(2, *versions.files[2])
    pinned = PolicyRef("pinned", 2)
    both = await asyncio.gather(
        *(engine.sample(request(f"l{i}", tokens=30)) for i in range(2)),
        *(engine.sample(request(f"p{i}", tokens=30, policy=pinned)) for i in range(2)),
    )
    assert [sample.spans[0].version for sample in both] == [0, 0, 2, 2]
    assert both[0].ids == both[1].ids and both[2].ids == both[3].ids and both[0].ids != both[2].ids
    running = asyncio.create_task(engine.sample(request("long", tokens=200, policy=pinned)))
    await until(engine, 150)
    await engine.unpin(2)
    await versions.load(engine, 1)
    assert [span.version for span in (await running).spans] == [2], "neither a flip nor an unpin touches it"
    with pytest.raises(EngineError, match="version 2 is not pinned"):
        await engine.sample(request("late", policy=pinned))


async def test_a_version_with_other_bits_forwards_everything_again(engine: EmbeddedEngine, versions: Versions) -> None:
    """A trainer that repeats a step may give its version other bits, and a span names the version alone."""
    earlier = await engine.sample(request("earlier", tokens=70))
    running = asyncio.create_task(engine.sample(request("running", (4, 5, 6), tokens=200)))
    await until(engine, 70 + 20)
    await engine.load(0, *versions.files[1])
    sample = await running
    assert sample == await engine.sample(request("fresh", (4, 5, 6), tokens=200)), "the call began again"
    assert sample.spans == (Span(0, 202, 0),) and engine.stats()["redrawn"] == 1
    context = (1, 2, 3, *earlier.ids, 9)
    again = await engine.sample(request("earlier", context))
    assert again == await engine.sample(request("other", context)) and again.spans == (Span(0, 81, 0),)
    await versions.load(engine, 2)
    mixed = await engine.sample(request("earlier", (*context, *again.ids, 9)))
    assert mixed.spans == (Span(81, 90, 2),), "a new version keeps what the one before it forwarded"
    await engine.load(2, *versions.files[3])
    context = (*context, *again.ids, 9, *mixed.ids, 9)
    last = await engine.sample(request("earlier", context))
    assert last == await engine.sample(request("another", context)) and last.spans[0].start == 0


async def test_a_pinned_version_with_other_bits_forwards_its_own_sessions_again(
    engine: EmbeddedEngine, versions: Versions
) -> None:
    await engine.pin(2, *versions.files[2])
    pinned = PolicyRef("pinned", 2)
    latest = asyncio.create_task(engine.sample(request("latest", tokens=200)))
    running = asyncio.create_task(engine.sample(request("running", tokens=200, policy=pinned)))
    await until(engine, 40)
    await engine.pin(2, *versions.files[3])
    assert await running == await engine.sample(request("fresh", tokens=200, policy=pinned))
    assert (await latest).spans == (Span(0, 202, 0),) and engine.stats()["redrawn"] == 1


async def test_prefixes_are_shared_only_under_the_same_weights(engine: EmbeddedEngine, versions: Versions) -> None:
    prompt = tuple(range(200))
    first = await engine.sample(request("a", prompt, tokens=3))
    second = await engine.sample(request("b", prompt, tokens=3))
    assert engine.stats()["reused"] == 192 and second == first
    await versions.load(engine, 1)
    third = await engine.sample(request("c", prompt, tokens=3))
    assert engine.stats()["reused"] == 192 and {span.version for span in third.spans} == {1}
    await versions.load(engine, 0)
    assert await engine.sample(request("d", prompt, tokens=3)) == first


async def test_requests_that_start_together_compute_their_prefix_once(engine: EmbeddedEngine) -> None:
    prompt = tuple(range(130))
    await asyncio.gather(*(engine.sample(request(f"g{i}", prompt, tokens=4, seed=i)) for i in range(4)))
    assert engine.stats()["forwarded"] == 130 + 3 * 2 + 4 * 3


async def test_cancelling_a_task_drops_its_request(engine: EmbeddedEngine) -> None:
    other = asyncio.create_task(engine.sample(request("other", tokens=300)))
    task = asyncio.create_task(engine.sample(request("gone", tokens=10_000)))
    await until(engine, 40)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await engine.sample(request("gone", tokens=5))
    fresh = await engine.sample(request("fresh", tokens=5))
    assert again == fresh and len((await other).ids) == 300
    assert engine.stats()["running"] == 0


async def test_one_session_samples_once_at_a_time(engine: EmbeddedEngine) -> None:
    task = asyncio.create_task(engine.sample(request(tokens=200)))
    await until(engine, 1)
    with pytest.raises(EngineError, match="session s is sampling already"):
        await engine.sample(request())
    assert len((await task).ids) == 200


async def test_closing_a_session_ends_its_request(engine: EmbeddedEngine) -> None:
    task = asyncio.create_task(engine.sample(request(tokens=10_000)))
    await until(engine, 5)
    await engine.close("s")
    with pytest.raises(EngineError, match="session s was closed"):
        await task
    await engine.close("s")
    assert (await engine.sample(request())).spans[0].start == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ids": (1, 320)}, "token id 320 is outside the vocabulary of 320"),
        ({"ids": (-1,)}, "token id -1 is outside"),
        ({"ids": ()}, "no tokens"),
        ({"tokens": 0}, "expected max_turn_tokens >= 1"),
        ({"temperature": -1.0}, "temperature >= 0, got -1.0"),
        ({"temperature": math.nan}, "temperature >= 0, got nan"),
        ({"tokens": 40_000}, "exceed 32768 positions"),
        ({"policy": PolicyRef("pinned", 9)}, "version 9 is not pinned"),
        ({"policy": PolicyRef("scripted", name="oracle")}, "no scripted policy"),
    ],
)
async def test_what_cannot_be_sampled_is_refused(engine: EmbeddedEngine, changes: dict[str, object], text: str) -> None:
    with pytest.raises(EngineError, match=text):
        await engine.sample(request(**changes))  # type: ignore[arg-type]
    assert len((await engine.sample(request())).ids) == 8


async def test_nothing_loaded_nothing_sampled(versions: Versions) -> None:
    engine = versions.engine(cache_blocks=2)
    assert engine.version == -1
    with pytest.raises(EngineError, match="the engine has no weights yet"):
        await engine.sample(request())
    await versions.load(engine, 0)
    with pytest.raises(EngineError, match="may need 4 KV blocks, the cache has 2"):
        await engine.sample(request(tokens=250))
    await engine.stop()


async def test_stopping_answers_everybody(versions: Versions) -> None:
    engine = versions.engine(max_batch=1)
    await versions.load(engine, 0)
    tasks = [asyncio.create_task(engine.sample(request(f"s{i}", tokens=10_000))) for i in range(3)]
    await until(engine, 5)
    await engine.stop()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError) and "stopped" in str(result)
    with pytest.raises(EngineError, match="stopped"):
        await engine.sample(request())
    await engine.stop()


async def test_more_requests_than_fit_wait_their_turn(versions: Versions) -> None:
    engine = versions.engine(max_batch=3, cache_blocks=9)
    await versions.load(engine, 0)
    samples = await asyncio.gather(
        *(engine.sample(request(f"s{i}", tuple(range(i + 1)), tokens=90)) for i in range(12))
    )
    assert [len(sample.ids) for sample in samples] == [90] * 12
    await engine.stop()


async def test_the_product_goes_first_and_training_goes_on(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[bool]] = []
    """For each step, which of its requests are the product's."""
    serve = engine._worker._serve

    def served(weights: LoadedWeights, jobs: list[EngineJob]) -> None:
        steps.append([job.urgent for job in jobs])
        serve(weights, jobs)

    monkeypatch.setattr(engine._worker, "_serve", served)
    training = [request(f"t{i}", tokens=56, seed=i) for i in range(6)]  # four run, two wait
    tasks = [asyncio.create_task(engine.sample(each)) for each in training]
    await until(engine, 20)
    asked = msgspec.structs.replace(request("user", tokens=32), lane="production")
    users = await asyncio.gather(*(engine.sample(msgspec.structs.replace(asked, session=f"u{i}")) for i in range(2)))
    samples = await asyncio.gather(*tasks)
    product = [step for step in steps if any(step)]
    shared = [at for at, step in enumerate(product) if not all(step)]
    assert len(product) >= 32 and shared == list(range(SHARED - 1, len(product), SHARED))
    alone = [await engine.sample(msgspec.structs.replace(each, session="alone")) for each in (*training, asked)]
    assert [sample.ids for sample in alone] == [sample.ids for sample in (*samples, users[0])], (
        "the order changes no draw"
    )


async def test_a_failing_forward_is_an_error_not_a_hang(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = engine._worker.latest
    assert latest is not None

    def broken(*_: object) -> None:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(latest.model, "forward_cached", broken)
        with pytest.raises(EngineError, match=r"forward pass failed: MemoryError\('no memory left'\)"):
            await engine.sample(request())
    assert len((await engine.sample(request())).ids) == 8


async def test_weights_that_diverged_are_an_error(engine: EmbeddedEngine, versions: Versions, tmp_path: Path) -> None:
    state = versions.model(0).state()
    state["model.norm.weight"][3] = math.nan
    await engine.load(9, str(tmp_path / "nan"), tensor_state.write(tmp_path / "nan", state))
    with pytest.raises(EngineError, match="version 9 gives logits that are not finite"):
        await engine.sample(request())
    await versions.load(engine, 0)
    assert (await engine.sample(request())).spans == (Span(0, 10, 0),)


async def test_many_experts_travel_in_two_bytes(tmp_path: Path) -> None:
    config = tiny.config(experts=300, expert_dim=8)
    wide = Versions(config, tmp_path)
    engine = wide.engine()
    await wide.load(engine, 0)
    sample = await engine.sample(request(tokens=30))
    await engine.stop()
    assert sample.routed is not None and sample.routed.dtype == "<u2" and sample.routed.shape == (32, 2, 2)
    ids, rows = torch.tensor([1, 2, 3, *sample.ids])[:-1], list[torch.Tensor]()
    wide.model(0)(ids, [len(ids)], recorder=rows)
    routes = moe.from_array(sample.routed, 2, 2)
    assert torch.equal(routes, torch.stack(rows, 1)) and int(routes.max()) > 255


async def test_a_dense_policy_has_no_routes(tmp_path: Path) -> None:
    dense = Versions(tiny.config(experts=0, top_k=0), tmp_path)
    engine = dense.engine()
    await dense.load(engine, 0)
    sample = await engine.sample(request())
    await engine.stop()
    assert sample.routed is None and len(sample.ids) == 8


async def test_long_and_short_contexts_start_together(engine: EmbeddedEngine) -> None:
    contexts = [tuple(i % 320 for i in range(n, 2 * n)) for n in (900, 2, 3, 40)]
    together = await asyncio.gather(*(engine.sample(request(f"t{i}", c)) for i, c in enumerate(contexts)))
    assert [await engine.sample(request(f"a{i}", c)) for i, c in enumerate(contexts)] == list(together)


async def test_the_event_loop_stays_free(engine: EmbeddedEngine) -> None:
    """While a long turn is drawn, the loop runs callbacks at its own pace, some for each token."""
    task = asyncio.create_task(engine.sample(request(tokens=60)))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 120


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])).repeat(20_000, 1)
    chance = torch.tensor([uniform(3, position) for position in range(20_000)], dtype=torch.float64)
    ids, logprobs = draw(logits, torch.ones(20_000), chance)
    counts = collections.Counter(ids.tolist())
    assert set(counts) == {0, 2, 3}, "what has no probability is never drawn"
    for token, p in ((0, 0.5), (2, 0.3), (3, 0.2)):
        assert abs(counts[token] / 20_000 - p) < 0.015
        assert float(logprobs[ids == token][0]) == pytest.approx(math.log(p), abs=1e-6)
    assert len({uniform(seed, position) for seed in range(100) for position in range(100)}) == 10_000
    assert 0 < min(uniform(0, i) for i in range(1000)) and max(uniform(0, i) for i in range(1000)) < 1
