"""Squashing: the sum of deltas is the delta between its ends, smaller than they are, and never trusted blindly."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.messages import subjects
from headrace.messages.weights import WeightChunk
from headrace.weights import chain, proof, snapshot
from headrace.weights.codecs import codec, ulp_delta
from headrace.weights.codecs.codec import CODECS, DIFFERENCE, FULL, SPARSE, Place
from headrace.weights.codecs.streams import ZSTD
from headrace.weights.publishing import squash
from headrace.weights.receiving.staging import BrokenVersion
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.state import Bits, WeightError
from tests.conftest import Connect
from tests.support.chains import Run
from tests.support.keys import PUBLISHER, trust
from tests.support.weights import stepped, weights

pytestmark = pytest.mark.anyio


def one_by_one(codes: list[int], count: int, density: float) -> tuple[list[codec.Frame], Bits, Bits]:
    """Frames of several steps, coded as asked; the weights before and after."""
    rng = np.random.default_rng(21)
    base = weights(rng, count)
    frames, now = [], base
    place = Place(0, "BF16", b"b" * 16, b"t" * 16)
    for code in codes:
        after = stepped(rng, now, density)
        at, old, new = ulp_delta.changes(now, after)
        if code == SPARSE:
            made = codec._sparse(place, code, at, ulp_delta.zigzag_difference(old, new), [now], ZSTD)
        else:
            made = codec._dense(place, code, now, after, ZSTD)
        frames += [frame for frame, _ in made]
        now = after
    return frames, base, now


@pytest.mark.parametrize("codes", [[SPARSE] * 8, [DIFFERENCE] * 3, [SPARSE, DIFFERENCE, SPARSE]])
@pytest.mark.parametrize("density", [0.001, 0.02, 0.4])
def test_differences_compose(codes: list[int], density: float) -> None:
    frames, base, after = one_by_one(codes, 200_000, density)
    place = Place(0, "BF16", b"b" * 16, b"t" * 16)
    made = squash._squashed(place, frames, base.dtype, base.size, ZSTD)
    out = base.copy()
    for data, _ in made:
        codec.apply(codec.from_bytes(data), base, out, "BF16")
    assert np.array_equal(out, after)
    assert sum(items for _, items in made) == np.count_nonzero(base != after)
    direct = sum(len(codec.to_bytes(f)) for f, _ in codec.encode(place, [base], [after], CODECS["d8-zstd"]))
    assert sum(len(data) for data, _ in made) <= 1.05 * direct


def test_a_step_there_and_back_is_no_change() -> None:
    rng = np.random.default_rng(22)
    base = weights(rng, 5000)
    after = stepped(rng, base, 0.1)
    place = Place(0, "BF16", b"b" * 16, b"t" * 16)
    frames = [
        frame
        for old, new in ((base, after), (after, base))
        for frame, _ in codec.encode(place, [old], [new], CODECS["d8-zstd"])
    ]
    assert squash._squashed(place, frames, base.dtype, base.size, ZSTD) == []


def test_what_needs_its_base_does_not_compose() -> None:
    frames, base, _ = one_by_one([FULL], 3000, 0.1)
    with pytest.raises(squash.NotComposable, match="full cannot be composed"):
        squash._squashed(Place(0, "BF16", b"", b""), frames, base.dtype, base.size, ZSTD)


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[Run]:
    yield Run(await connect("weight_sync"), tmp_path / "trainer", signer=PUBLISHER)


@pytest.mark.parametrize("name", ["d8-zstd", "d10-zstd"])
async def test_eight_versions_behind_costs_half_and_the_receiver_chooses(run: Run, tmp_path: Path, name: str) -> None:
    run.codec, run.wide = name, 3000
    for version in range(9):
        await run.publish(version, density=0.03)
    head = run.heads[8]
    record = await squash.publish(run.bus, run.bus, head, count=8, name=name, signer=PUBLISHER, trust=trust())
    assert (record.base_version, record.version) == (0, 8)
    assert [squashed async for squashed in chain.squashes(run.bus, run.id, trust())] == [record]
    behind, near = SnapshotStore(tmp_path / "behind"), SnapshotStore(tmp_path / "near")
    for store, version in ((behind, 0), (near, 7)):
        store.take(run.path(version), version)
        store.put(version, run.heads[version].state_hash)
    long = await chain.plan(run.bus, head, behind.find, trust=trust(), squashed=False)
    short = await chain.obtain(run.bus, head, tmp_path / "v", behind.find, trust=trust())
    assert (len(long.manifests), len(short.manifests), short.squashed) == (8, 1, 1)
    # Steps of these tests hit other weights each time, so less is saved than in training, where the same ones move.
    assert short.wire_bytes < 0.9 * long.wire_bytes
    assert snapshot.file_hash(tmp_path / "v") == head.state_hash
    assert [m.version for m in (await chain.plan(run.bus, head, near.find, trust=trust())).manifests] == [8]
    chain_proof = await proof.prove(run.bus, run.id, trust())
    assert (chain_proof.faults, chain_proof.versions, chain_proof.squashes, chain_proof.signed) == ([], 9, 1, True)
    with pytest.raises(BrokenVersion, match="at least 2 to squash"):
        await squash.publish(run.bus, run.bus, run.heads[1], count=8)


async def test_a_broken_squash_is_not_used_and_an_unknown_publishers_is_not_seen(run: Run, tmp_path: Path) -> None:
    run.wide = 1000
    for version in range(4):
        await run.publish(version)
    head = run.heads[3]
    store = SnapshotStore(tmp_path / "node")
    store.take(run.path(0), 0)
    store.put(0, run.heads[0].state_hash)
    await squash.publish(run.bus, run.bus, head, count=3)
    assert (await chain.plan(run.bus, head, store.find, trust=trust())).squashed == 0, "nobody signed it"
    record = await squash.publish(run.bus, run.bus, head, count=3, signer=PUBLISHER)
    manifest = await chain.manifest(run.bus, run.id, record.manifest_seq)
    spoiled = {info.stream_seq for info in manifest.chunks}

    class Spoiling:
        """The real bus, but the squash's chunks are damaged for good."""

        last, history = run.bus.last, run.bus.history

        async def get(self, stream: str, seq: int) -> Any:
            received = await run.bus.get(stream, seq)
            if seq in spoiled:
                assert isinstance(received.message, WeightChunk)
                received._message = msgspec.structs.replace(received.message, data=received.message.data[:-1])
            return received

    told: list[str] = []
    way = await chain.obtain(Spoiling(), head, tmp_path / "v", store.find, on_damage=told.append, trust=trust())
    assert way.squashed == 0 and "from its full snapshot instead" in told[-1]
    assert snapshot.file_hash(tmp_path / "v") == head.state_hash
    chain_proof = await proof.prove(Spoiling(), run.id, trust())
    assert len(chain_proof.faults) == 1 and "squash to version 3" in chain_proof.faults[0]


async def test_the_whole_chain_is_proved_or_every_fault_is_named(run: Run) -> None:
    run.wide = 1000
    for version in range(4):
        await run.publish(version)
        if version == 2:
            await run.full()
    chain_proof = await proof.prove(run.bus, run.id, trust())
    assert (
        chain_proof.faults,
        chain_proof.versions,
        chain_proof.full_snapshots,
        chain_proof.first,
        chain_proof.newest,
    ) == ([], 4, 1, 0, 3)
    assert chain_proof.state_hash == run.heads[3].state_hash
    forged = msgspec.structs.replace(run.heads[1], state_hash="f" * 32)
    await run.bus.publish(subjects.WEIGHT_HEAD.at(run=run.id), forged)
    await run.bus.publish(subjects.WEIGHT_HEAD.at(run=run.id), run.heads[2])
    chain_proof = await proof.prove(run.bus, run.id, trust())
    assert chain_proof.versions == 4
    assert ["it was changed" in chain_proof.faults[0], "an old head was stored again" in chain_proof.faults[1]] == [
        True,
        True,
    ]


async def test_who_joins_while_old_versions_are_collected_is_served(run: Run, tmp_path: Path, connect: Connect) -> None:
    from headrace.weights.publishing import collect

    run.wide = 1000
    trainer = await connect("trainer")
    for version in range(10):
        await run.publish(version)
        if version % 2 and version < 9:
            await run.full()
    chains = sorted({head.full_version for head in run.heads})
    assert chains == [0, 1, 3, 5, 7]
    with pytest.raises(WeightError, match="at least 2 chains"):
        await collect.collect(run.bus, lambda subject: trainer.purge("HR_WEIGHTS", subject=subject), run.id, chains=1)
    head, purged, joined = run.heads[9], asyncio.Event(), asyncio.Event()

    async def purge(subject: str) -> int:
        """Stops after the first purge until the joiner is in the middle of its fetch."""
        gone = await trainer.purge("HR_WEIGHTS", subject=subject)
        purged.set()
        await joined.wait()
        return gone

    class Joiner:
        """The real bus; the first fetch lets the collection go on and waits for its end."""

        last, history = run.bus.last, run.bus.history

        async def get(self, stream: str, seq: int) -> Any:
            if purged.is_set() and not joined.is_set():
                joined.set()
                await collecting
            return await run.bus.get(stream, seq)

    collecting = asyncio.create_task(collect.collect(run.bus, purge, run.id, chains=3, pins=[1], trust=trust()))
    await purged.wait()
    way = await chain.obtain(Joiner(), head, tmp_path / "new", lambda version, hash: None, trust=trust())
    gone = await collecting
    assert snapshot.file_hash(tmp_path / "new") == head.state_hash and way.manifests[0].version == 7
    assert sorted(gone) == [2], "0 and 1 are what the pinned version needs"
    for version in (1, 3, 4, 9):
        path = tmp_path / str(version)
        await chain.obtain(run.bus, run.heads[version], path, lambda version, hash: None, trust=trust())
        assert snapshot.file_hash(path) == run.heads[version].state_hash
    with pytest.raises(BrokenVersion, match="cannot be built any more"):
        await chain.plan(run.bus, run.heads[2], trust=trust())
    chain_proof = await proof.prove(run.bus, run.id, trust())
    assert (chain_proof.faults, chain_proof.collected, chain_proof.newest) == ([], 1, 9)
