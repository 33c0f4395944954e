"""The cases that every engine passes: embedded, SGLang's double, and the real servers under their markers."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from headrace.engines.base import Engine, EngineError, Progress, RefusedVersion, Sample, SampleRequest
from headrace.messages.rollout import PolicyRef
from tests.support import tiny
from tests.support.engines import Versions, request, session
from tests.support.sglang import server_fixture as sglang
from tests.support.sglang.requests import attached
from tests.support.vllm import server_fixture as vllm

pytestmark = pytest.mark.anyio

ENGINES = [
    "embedded",
    "double",
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("vllm", marks=pytest.mark.vllm),
]
CLOSE = {"embedded": 1e-4, "double": 1e-4, "sglang": 2e-3, "vllm": 2e-3}
"""The largest difference of a log-probability from the model's own, in nats."""


NUMBERS = itertools.count()
LONG = {"embedded": 150, "double": 150, "sglang": 900, "vllm": 900}
"""Tokens of a turn that is still in flight when it is interrupted."""


class Made(NamedTuple):
    """An engine that serves version 0, and the files of its versions."""

    kind: str
    engine: Engine
    versions: Versions

    async def sample(self, one: SampleRequest) -> Sample:
        return await self.engine.sample(one)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=ENGINES)
async def made(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Made]:
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    config = tiny.config(heads=4, kv_heads=2)
    if kind == "vllm":  # its CPU build records no routes
        config = tiny.config(heads=4, kv_heads=2, experts=0, top_k=0)
    versions = Versions(config, folder, exact=False)
    async with AsyncExitStack() as stack:
        if kind == "embedded":
            embedded = versions.engine()
            stack.push_async_callback(embedded.stop)
            await versions.load(embedded, 0)
            yield Made(kind, embedded, versions)
        elif kind == "double":
            engine, _ = await stack.enter_async_context(attached(versions, folder))
            yield Made(kind, engine, versions)
        else:
            real = sglang.real(versions, folder) if kind == "sglang" else vllm.real(versions, folder)
            yield Made(kind, await stack.enter_async_context(real), versions)


@pytest.fixture(autouse=True)
async def on_version_0(made: Made) -> None:
    """Cases share a server, and each begins on version 0."""
    if made.engine.version != 0:
        await made.versions.load(made.engine, 0)


def one(ids: tuple[int, ...] = (1, 2, 3), name: str = "", **more: object) -> SampleRequest:
    """A request; without a name it has a session of its own."""
    return request(name or f"s{next(NUMBERS)}", ids, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
async def test_a_turn_ends_at_its_limit(made: Made, tokens: int) -> None:
    sample = await made.sample(one(tokens=tokens))
    assert len(sample.ids) == len(sample.logprobs) == tokens and sample.stop == "length"


@pytest.mark.parametrize("at", [0, 1, 5])
async def test_a_stop_id_ends_a_turn_and_is_included(made: Made, at: int) -> None:
    plain = (await made.sample(one(tokens=8, temperature=0.0))).ids
    stopped = await made.sample(one(tokens=8, temperature=0.0, stops=(plain[at],)))
    first = plain.index(plain[at])
    assert stopped.ids == plain[: first + 1] and stopped.stop == "stop"


async def test_the_first_of_several_stop_ids_counts(made: Made) -> None:
    plain = (await made.sample(one(tokens=8, temperature=0.0))).ids
    stopped = await made.sample(one(tokens=8, temperature=0.0, stops=(plain[4], plain[2], 319)))
    assert stopped.ids[-1] in (plain[4], plain[2]) and len(stopped.ids) <= 3


async def test_a_stop_id_in_the_context_ends_nothing(made: Made) -> None:
    plain = await made.sample(one((7, 9), tokens=4, temperature=0.0))
    unused = next(id for id in range(320) if id not in plain.ids)
    assert (await made.sample(one((7, 9), tokens=4, temperature=0.0, stops=(unused,)))).ids == plain.ids


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
async def test_log_probabilities_are_those_of_the_sampled_distribution(made: Made, temperature: float) -> None:
    """Those of temperature 1 for greedy draws."""
    context = (5, 6, 7, 8)
    sample = await made.sample(one(context, tokens=12, temperature=temperature))
    ids = [*context, *sample.ids]
    routed = None
    if made.versions.config.experts:
        from headrace.policy import moe

        routed = moe.from_array(sample.routed, made.versions.config.sparse_layers, made.versions.config.top_k)
    from headrace.policy import scoring

    models = {0: made.versions.model(0)}
    scored = scoring.score(models, ids, sample.spans, range(4, len(ids)), temperature or 1.0, routed)
    assert max(abs(a - b) for a, b in zip(sample.logprobs, scored.tolist(), strict=True)) < CLOSE[made.kind]
    assert all(math.isfinite(value) and value <= 0 for value in sample.logprobs)


@pytest.mark.parametrize("length", [1, 2, 33, 300])
async def test_spans_cover_every_position_but_the_last(made: Made, length: int) -> None:
    context = tuple(index % 300 for index in range(length))
    sample = await made.sample(one(context, tokens=5))
    assert [(span.start, span.end, span.version) for span in sample.spans] == [(0, length + 4, 0)]


async def test_a_mixture_has_a_row_of_routes_for_each_forwarded_position(made: Made) -> None:
    sample, config = await made.sample(one(tokens=6)), made.versions.config
    if not config.experts:
        assert sample.routed is None
        return
    assert sample.routed is not None and sample.routed.shape == (8, config.sparse_layers, config.top_k)


@pytest.mark.parametrize("routed", [1, 2])
async def test_routes_that_the_caller_has_are_not_repeated(made: Made, routed: int) -> None:
    sample = await made.sample(msgspec.structs.replace(one(tokens=4), routed=routed))
    if sample.routed is not None:
        start = sample.routed_start if isinstance(sample.routed_start, int) else 0
        assert start <= routed and len(sample.ids) + 2 - start == sample.routed.shape[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_turns_of_a_session_are_contiguous(made: Made, seed: int) -> None:
    record = await session(made.engine, made.versions.config, f"contiguous{seed}", [1, 2, 3], seed)
    assert {span.version for span in record.spans} == {0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": ()},
        {"ids": (1, 320)},
        {"ids": (-1,)},
        {"stop_ids": (320,)},
        {"stop_ids": (-5,)},
        {"routed": 3},
        {"routed": -1},
    ],
    ids=str,
)
async def test_a_wrong_request_is_refused_and_the_engine_serves_on(made: Made, wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        await made.sample(msgspec.structs.replace(one(), **wrong))
    assert len((await made.sample(one(tokens=2))).ids) == 2


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"tokens": 10**7}, {"temperature": -1.0}, {"temperature": math.inf}], ids=str
)
async def test_wrong_sampling_is_refused_and_the_engine_serves_on(made: Made, wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        await made.sample(one(**wrong))
    assert len((await made.sample(one(tokens=2))).ids) == 2


async def test_the_next_turn_is_sampled_by_the_next_version(made: Made) -> None:
    before = await made.sample(one(tokens=6, temperature=0.0))
    await made.versions.load(made.engine, 1)
    after = await made.sample(one(tokens=6, temperature=0.0))
    assert made.engine.version == 1 and {span.version for span in after.spans} == {1}
    assert after.logprobs != before.logprobs
    await made.versions.load(made.engine, 0)
    assert (await made.sample(one(tokens=6, temperature=0.0))).ids == before.ids


async def test_a_session_after_a_swap_says_which_positions_it_forwarded_again(made: Made) -> None:
    first = await made.sample(one(name="swapped", tokens=4))
    await made.versions.load(made.engine, 1)
    context = (1, 2, 3, *first.ids, 9)
    second = await made.sample(one(context, "swapped", tokens=4))
    assert second.spans[-1].version == 1 and second.spans[-1].end == len(context) + 3
    assert all(a.end == b.start for a, b in zip(second.spans, second.spans[1:], strict=False))


async def followed(made: Made, tokens: int) -> tuple["asyncio.Task[Sample]", Progress]:
    """A long turn in flight that has a token."""
    progress = Progress(followed=True)
    asked = msgspec.structs.replace(one(tokens=tokens), progress=progress)
    work = asyncio.create_task(made.engine.sample(asked))
    await asyncio.wait({asyncio.create_task(progress.news()), work}, return_when=asyncio.FIRST_COMPLETED)
    return work, progress


async def test_requests_in_flight_continue_over_a_swap(made: Made) -> None:
    work, _ = await followed(made, LONG[made.kind])
    swap = await made.engine.load(1, *made.versions.files[1])
    sample = await work
    assert len(sample.ids) == LONG[made.kind] and sample.stop == "length" and swap.pause_ms >= 0
    assert {span.version for span in sample.spans} <= {0, 1} and sample.spans[-1].end == LONG[made.kind] + 2
    if made.kind != "double":  # the double is fast enough to be done
        assert [span.version for span in sample.spans] == [0, 1]


async def test_the_same_number_with_other_bits_begins_turns_again(made: Made) -> None:
    work, _ = await followed(made, LONG[made.kind])
    await made.engine.load(0, *made.versions.files[2])
    sample = await work
    assert len(sample.ids) == LONG[made.kind] and {span.version for span in sample.spans} == {0}
    await made.engine.load(0, *made.versions.files[0])


async def test_a_version_with_another_hash_is_refused_and_the_old_one_serves(made: Made) -> None:
    with pytest.raises(RefusedVersion):
        await made.engine.load(5, made.versions.files[1][0], "0" * 64)
    sample = await made.sample(one(tokens=3))
    assert made.engine.version == 0 and {span.version for span in sample.spans} == {0}


async def test_a_version_whose_file_is_gone_is_an_error_and_the_old_one_serves(made: Made, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        await made.engine.load(5, str(tmp_path / "none"), "0" * 64)
    assert made.engine.version == 0 and (await made.sample(one(tokens=3))).ids


async def test_a_pinned_version_samples_what_names_it(made: Made) -> None:
    await made.engine.pin(3, *made.versions.files[3])
    pinned = await made.sample(one(tokens=3, policy=PolicyRef(kind="pinned", version=3)))
    latest = await made.sample(one(tokens=3))
    assert {span.version for span in pinned.spans} == {3} and {span.version for span in latest.spans} == {0}
    await made.engine.unpin(3)
    with pytest.raises(EngineError):
        await made.sample(one(tokens=3, policy=PolicyRef(kind="pinned", version=3)))


async def test_a_version_that_nobody_pinned_is_an_error(made: Made) -> None:
    with pytest.raises(EngineError):
        await made.sample(one(policy=PolicyRef(kind="pinned", version=77)))


async def test_progress_has_the_ids_of_the_sample(made: Made) -> None:
    work, progress = await followed(made, 40)
    sample = await work
    assert progress.ids and tuple(progress.ids) == sample.ids[: len(progress.ids)]


async def test_a_turn_that_is_cut_keeps_its_tokens(made: Made) -> None:
    work, progress = await followed(made, LONG[made.kind])
    progress.cut()
    sample = await work
    if made.kind != "double":
        assert sample.stop == "abort" and 0 < len(sample.ids) < LONG[made.kind]
    assert len(sample.ids) == len(sample.logprobs) and sample.spans[-1].end == 2 + len(sample.ids)


async def test_a_turn_that_is_cancelled_leaves_the_engine_as_it_was(made: Made) -> None:
    work, _ = await followed(made, LONG[made.kind])
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert len((await made.sample(one(tokens=4))).ids) == 4


@pytest.mark.parametrize("count", [2, 12])
async def test_turns_at_the_same_time_have_their_own_tokens(made: Made, count: int) -> None:
    asked = [one((index + 1, index + 2), tokens=6, temperature=0.0) for index in range(count)]
    alone = [await made.sample(single) for single in asked]
    together = await asyncio.gather(*map(made.sample, asked))
    assert all(len(sample.ids) == 6 for sample in together)
    for a, b in zip(alone, together, strict=True):
        assert abs(a.logprobs[0] - b.logprobs[0]) < CLOSE[made.kind]


async def test_a_closed_session_begins_again(made: Made) -> None:
    await made.sample(one(name="closed", tokens=4))
    await made.engine.close("closed")
    await made.engine.close("never seen")
    assert (await made.sample(one(name="closed", tokens=4))).spans[0].start == 0


async def test_lanes_are_all_served(made: Made) -> None:
    lanes = [msgspec.structs.replace(one(tokens=3), lane=lane) for lane in ("production", "eval", "train")]
    assert [len(sample.ids) for sample in await asyncio.gather(*map(made.sample, lanes))] == [3, 3, 3]


async def test_the_fingerprint_names_the_engine(made: Made) -> None:
    said = made.engine.fingerprint
    expected = {"double": "sglang-", "sglang": "sglang-", "vllm": "vllm-"}
    assert said.startswith(expected.get(made.kind, "")) and said
