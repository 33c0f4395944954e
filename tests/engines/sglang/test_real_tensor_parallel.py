"""The real SGLang server on this CPU with two ranks, in float32: each holds a part of every matrix, or of the experts.

`make test-sglang`; a server for each of the two ways. Gloo adds up the parts, because the shared-memory kernel needs
AMX. The checksums that are expected of a rank's part are compared with those of two real ranks here. With the experts
divided the server loads, and its CPU path cannot compute (0.5.23: an expert of another rank has the index -1), so that
only its weights are compared.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.engines.server.engine import OneServer
from headrace.engines.server.http import ServerError
from headrace.engines.server.weights import checksums
from headrace.engines.sglang import tensors
from headrace.engines.sglang.backend import digest
from headrace.engines.sglang.transport import Transport
from headrace.weights import tensor_state
from tests.engines.sglang.test_real import LONG, NATS_TOLERANCE, kept, received, routes, worst
from tests.support import tiny
from tests.support.engines import Record, Versions, request
from tests.support.sglang.requests import begun
from tests.support.sglang.server_fixture import checked, prepared, python, real

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

RANKS = checksums.Ranks(2)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    python()
    config = msgspec.structs.replace(tiny.config(), heads=4, kv_heads=2)
    return Versions(config, tmp_path_factory.mktemp("versions"), exact=False)


@pytest.fixture(scope="module", autouse=True)
def cores() -> Iterator[None]:
    """A server on a CPU wants a node of memory for each rank, unless it is told the cores of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(core) for core in range(RANKS.tensor)))
        yield


@pytest.fixture(scope="module")
async def engine(
    anyio_backend: object, versions: Versions, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[OneServer]:
    async with real(versions, tmp_path_factory.mktemp("server"), ("--tp-size", str(RANKS.tensor))) as made:
        yield made


async def held(engine: OneServer) -> dict[str, str]:
    """The checksums that the server's ranks report."""
    return await engine._backend.checksums(RANKS.tensor)


async def test_every_rank_holds_its_part_of_the_exported_checkpoint(engine: OneServer, versions: Versions) -> None:
    terms, stats = engine._life.terms, engine.stats()
    assert terms is not None and (terms.tp_size, terms.ep_size) == RANKS and engine.version == 0
    assert stats["checked"] and not stats["unchecked"], "the shards' checksums were compared and are those of the file"
    wanted = checksums.expected(versions.files[0][0], versions.config, "float32", digest, RANKS)
    seen = await held(engine)
    assert not checksums.difference(wanted, seen)
    assert {name.split(":")[0] for name in seen} == {"rank 0", "rank 1"}
    parts = [name.removeprefix("rank 0: ") for name in seen if name.startswith("rank 0: ")]
    divided = [name for name in parts if seen[f"rank 0: {name}"] != seen[f"rank 1: {name}"]]
    assert divided and len(divided) < len(parts), "matrices are divided, norms and routers are not"


async def test_turns_have_the_trainers_logprobs_and_routes(engine: OneServer, versions: Versions) -> None:
    record = Record(temperature=1.0)
    for more in (list(range(10, 40)), [5, 6, 7], [8]):
        sample = await engine.sample(request("turns", ids=(*record.ids, *more), tokens=24))
        record.add(more, sample, versions.config)
    gap = worst(record, versions)
    print(f"largest difference {gap:.2e} nats over {len(record.targets)} tokens")
    assert gap < NATS_TOLERANCE
    ours, theirs = routes(record, versions, engine.version)
    assert (ours.sort(-1).values == theirs.sort(-1).values).all()


@pytest.mark.parametrize("way", ["disk", "tensors"])
async def test_a_version_is_swapped_under_a_turn_with_the_checksums_of_every_rank(
    engine: OneServer, versions: Versions, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    old = engine.version
    transport = Transport(engine._wire, "auto", engine._swapper.folder, started=True)
    transport._off = way == "disk"
    monkeypatch.setattr(engine._swapper, "transport", transport)
    monkeypatch.setattr(tensors, "BUCKET", 100_000)
    work = asyncio.create_task(engine.sample(request(f"swap by {way}", ids=(11, 12, 13, 14), tokens=LONG * 4)))
    await begun(engine)
    await versions.load(engine, old + 1)
    sample, stats = await work, engine.stats()
    assert [span.version for span in sample.spans] == [old, old + 1] and checked(engine)
    assert bool(stats["tensor_bytes"]) == (way == "tensors") and not stats["tensor_failures"]
    gap = worst(kept([11, 12, 13, 14], sample, versions), versions)
    print(f"{way}: largest difference {gap:.2e} nats in two spans, pause {stats['pause_ms']:.0f} ms")
    assert gap < NATS_TOLERANCE


async def test_a_delta_ends_in_the_trainers_checksums_of_every_rank(
    engine: OneServer, versions: Versions, tmp_path: Path
) -> None:
    """Sender, chunks, receiver, stage, server; differences inside the server are for one rank alone."""
    number = engine.version + 4 - engine.version % 4
    await versions.load(engine, number)
    state = versions.model(0).state()
    after, manifest, file = received(state, Path(versions.files[0][0]), tmp_path)
    await engine.load(number + 1, str(file), manifest.state_hash)
    assert checked(engine)
    seen = await held(engine)
    for version, equal in ((after, True), (state, False)):
        tensor_state.write(tmp_path / "whole", version)
        wanted = checksums.expected(tmp_path / "whole", versions.config, "float32", digest, RANKS)
        assert (not checksums.difference(wanted, seen)) == equal
    await versions.load(engine, number + 4)


async def test_bits_of_one_rank_alone_show_in_its_checksums(
    engine: OneServer, versions: Versions, tmp_path: Path
) -> None:
    """The last rows of a divided matrix are in rank 1."""
    state = versions.model(engine.version).state()
    tensor_state.write(tmp_path / "before", state)
    name = "model.layers.0.self_attn.q_proj.weight"
    state[name] = state[name].clone()
    state[name][-1] += 1e-3
    after = tensor_state.write(tmp_path / "after", state)
    await engine.load(engine.version + 1, str(tmp_path / "after"), after)
    assert checked(engine)
    wanted = checksums.expected(tmp_path / "before", versions.config, "float32", digest, RANKS)
    seen = await held(engine)
    differing = [label for label, value in wanted.items() if seen[label] != value]
    assert differing == ["rank 1: model.layers.0.self_attn.qkv_proj.weight"]


async def test_ranks_with_experts_of_their_own_hold_their_run_of_them(versions: Versions, tmp_path: Path) -> None:
    ranks = checksums.Ranks(2, 2)
    engine = prepared(versions, tmp_path, ("--tp-size", "2", "--ep-size", "2"))
    server, wire, stage = engine._server, engine._wire, engine._stage
    assert server is not None
    stage.put(0, *versions.files[0])
    try:
        await server.start(engine._backend.command(stage.folder, "0", server.port))
        while True:
            assert server.alive, server.reason()
            try:
                info = await wire.get("/server_info")
                break
            except ServerError:
                await asyncio.sleep(0.2)
        assert checksums.Ranks(info["tp_size"], info["ep_size"]) == ranks
        wanted = checksums.expected(versions.files[0][0], versions.config, "float32", digest, ranks)
        seen = await held(engine)
        assert not checksums.difference(wanted, seen)
        experts = "model.layers.0.mlp.experts.w13_weight"
        assert seen[f"rank 0: {experts}"] != seen[f"rank 1: {experts}"]
        divided = checksums.expected(versions.files[0][0], versions.config, "float32", digest, RANKS)
        assert divided[f"rank 0: {experts}"] != wanted[f"rank 0: {experts}"], "another part than without groups"
    finally:
        await wire.close()
        await server.stop()
