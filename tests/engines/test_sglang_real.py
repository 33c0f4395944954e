"""The real SGLang server on this CPU: what the double claims, and what only the server can show.

One server for the module, `make test-sglang`. Tolerances are bfloat16's; nothing here depends on how fast it is.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from headrace.engines.base import EngineError
from headrace.engines.sglang import SglangEngine
from headrace.messages.rollout import Span
from headrace.weights import snapshot
from tests.engines.play import Record, Versions
from tests.engines.sglang_play import begun, request
from tests.engines.sglang_record import record_golden
from tests.engines.sglang_server_fixture import python, real
from tests.policy import tiny

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

NATS_TOLERANCE = 0.01
LONG = 96


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Random weights with a head as flat as a new one: bfloat16 logits of a head four times as sharp differ by 0.02."""
    python()
    made = Versions(tiny.config("bfloat16"), tmp_path_factory.mktemp("versions"), exact=False)
    for index, (model, (path, _)) in enumerate(zip(made.models, made.files, strict=True)):
        with torch.no_grad():
            model.head_weight.mul_(0.25)
        made.files[index] = (path, snapshot.write(path, model.state()))
    return made


@pytest.fixture(scope="module")
async def engine(
    anyio_backend: object, versions: Versions, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SglangEngine]:
    async with real(versions, tmp_path_factory.mktemp("server")) as made:
        yield made


def worst(record: Record, versions: Versions) -> float:
    """Largest |server - our trainer's code| in nats, the recorded routes replayed over carried KV."""
    rows = record.routed()[: len(record.ids) - 1]
    assert (rows >= 0).all()
    return float(
        (record.score(versions, routed=rows) - record.score(versions, routed=rows).new_tensor(record.logprobs))
        .abs()
        .max()
    )


async def on(engine: SglangEngine, versions: Versions, version: int) -> int:
    """Load the next version number whose weights are those of `version` mod 4, if it is not served."""
    if engine.version % 4 != version % 4 or engine.version < 0:
        number = engine.version + 1
        while number % 4 != version % 4:
            number += 1
        await versions.load(engine, number)
    return engine.version


async def test_it_started_fit_and_serves_the_exported_checkpoint(engine: SglangEngine) -> None:
    stats = engine.stats()
    assert engine.version == 0 and stats["checked"], "its checksums are those of the file"
    assert engine.fingerprint.startswith("sglang-") and await engine.health() == "serving"


async def test_two_turns_have_our_trainers_logprobs_and_routes(engine: SglangEngine, versions: Versions) -> None:
    record, before = Record(temperature=1.0), engine.counts["cached"]
    for more in (list(range(10, 40)), [5, 6, 7], [8]):
        sample = await engine.sample(request("turns", ids=(*record.ids, *more), tokens=24))
        record.add(more, sample, versions.config)
    assert [span.version for span in record.spans] == [engine.version] * 3
    assert engine.counts["cached"] - before == 53 + 80, "all but the new tokens of a turn came from the prefix cache"
    gap = worst(record, versions)
    print(f"largest difference {gap:.5f} nats over {len(record.targets)} tokens")
    assert gap < NATS_TOLERANCE
    live = versions.model(engine.version)
    recorder: list[torch.Tensor] = []
    with torch.no_grad():
        live(torch.tensor(record.ids[:-1]), [len(record.ids) - 1], None, recorder)
    ours = torch.stack(recorder, 1)
    theirs = record.routed()[: len(record.ids) - 1]
    share = float((ours.sort(-1).values == theirs.sort(-1).values).all(-1).float().mean())
    print(f"routes equal in {share:.4f} of token-layers")
    assert share > 0.98


async def test_greedy_and_other_temperatures_have_the_logprobs_that_they_say(
    engine: SglangEngine, versions: Versions
) -> None:
    for temperature in (0.5, 0.0):
        sample = await engine.sample(request(f"t{temperature}", ids=(9, 8, 7, 6), tokens=16, temperature=temperature))
        record = Record(temperature=temperature)
        record.add([9, 8, 7, 6], sample, versions.config)
        assert worst(record, versions) < NATS_TOLERANCE * (2 if temperature else 1)


@pytest.mark.parametrize("mode", ["in_place", "abort"])
async def test_spans_are_right_over_a_live_swap(engine: SglangEngine, versions: Versions, mode: str) -> None:
    old = await on(engine, versions, 0)
    engine._mode = mode  # type: ignore[assignment]
    prompt = [11, 12, 13, 14]
    work = asyncio.create_task(engine.sample(request(f"swap-{mode}", ids=tuple(prompt), tokens=LONG * 8)))
    await begun(engine)
    await versions.load(engine, old + 1)
    sample = await work
    engine._mode = "in_place"
    assert [span.version for span in sample.spans] == [old, old + 1] and len(sample.ids) == LONG * 8
    stats = engine.stats()
    print(f"{mode}: pause {stats['pause_ms']:.0f} ms, staging {stats['stage_ms']:.0f} ms beside it")
    assert stats["checked"]
    record = Record(temperature=1.0)
    record.add(prompt, sample, versions.config)
    if mode == "in_place":
        assert worst(record, versions) < 2 * NATS_TOLERANCE, "KV is carried over the swap as the spans say"
    again = await engine.sample(request(f"swap-{mode}", ids=(*record.ids, 5), tokens=4))
    assert again.spans == (Span(0, len(record.ids) + 4, old + 1),)


async def test_a_prompt_is_shared_under_one_version_and_not_over_a_swap(
    engine: SglangEngine, versions: Versions
) -> None:
    prompt = tuple(range(100, 150))
    counts = [engine.counts["cached"]]
    for name in ("a", "b"):
        await engine.sample(request(name, ids=prompt, tokens=4))
        counts.append(engine.counts["cached"])
    await versions.load(engine, engine.version + 1)
    sample = await engine.sample(request("c", ids=prompt, tokens=4))
    counts.append(engine.counts["cached"])
    assert [b - a for a, b in itertools.pairwise(counts)] == [0, 49, 0]
    record = Record(temperature=1.0)
    record.add(list(prompt), sample, versions.config)
    assert worst(record, versions) < NATS_TOLERANCE


async def test_guards_keep_the_server_alive(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="outside the vocabulary"):
        await engine.sample(request(ids=(1, 99_999)))
    assert (await engine.sample(request("alive"))).stop == "length"


async def test_an_update_that_fails_is_never_served(engine: SglangEngine, versions: Versions, tmp_path: Path) -> None:
    """A file that is whole and verified, and does not fit the model. The server's own rollback reads the same file
    again and ends the server (0.5.23); the turn that ran goes on under the old version all the same."""
    version = await on(engine, versions, 0)
    state = versions.model(1).state()
    name = "model.layers.1.self_attn.o_proj.weight"
    state[name] = state[name][:, :-1].contiguous()
    digest = snapshot.write(tmp_path / "broken", state)
    work = asyncio.create_task(engine.sample(request("undone", ids=(3, 4, 5), tokens=LONG * 4)))
    await begun(engine)
    with pytest.raises(EngineError, match=r"refused, the one before serves on|lost during the change"):
        await engine.load(version + 1, str(tmp_path / "broken"), digest)
    sample = await work
    assert engine.version == version and {span.version for span in sample.spans} == {version}
    record = Record(temperature=1.0)
    record.add([3, 4, 5], sample, versions.config)
    assert worst(record, versions) < NATS_TOLERANCE and engine.stats()["checked"]


async def test_golden_files_can_be_recorded(engine: SglangEngine, versions: Versions) -> None:
    """The quirks that the double copies, asked of the server itself; HEADRACE_RECORD=1 writes them down."""
    found = await record_golden(engine._wire, versions.config, engine._stage.folder)
    await versions.load(engine, engine.version + 4)
    assert {"stop", "abort_running", "unknown_field", "start_too_far", "duplicate_rid", "updated_but_400"} <= set(found)


async def test_a_turn_outlives_a_killed_server(engine: SglangEngine, versions: Versions) -> None:
    version = await on(engine, versions, 2)
    lost, starts = engine.counts["lost"], engine.stats()["starts"]
    work = asyncio.create_task(engine.sample(request("killed", ids=(3, 4, 5), tokens=LONG * 4)))
    await begun(engine)
    server = engine._server
    assert server is not None and server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    sample = await work
    assert len(sample.ids) == LONG * 4 and sample.spans == (Span(0, 3 + LONG * 4 - 1, version),)
    assert engine.counts["lost"] == lost + 1 and engine.stats()["starts"] == starts + 1
    assert engine.stats()["checked"]
