"""A chain is proved whole or every fault is named, and a node that joins while old versions are collected is served."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.messages import subjects
from headrace.weights import chain, proof, snapshot
from headrace.weights.publishing import collect
from headrace.weights.receiving.staging import BrokenVersion
from headrace.weights.state import WeightError
from tests.conftest import Connect
from tests.support.chains import Run
from tests.support.keys import PUBLISHER, trust

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[Run]:
    yield Run(await connect("weight_sync"), tmp_path / "trainer", signer=PUBLISHER)


async def test_the_whole_chain_is_proved_or_every_fault_is_named(run: Run) -> None:
    run.wide = 1000
    for version in range(4):
        await run.publish(version)
        if version == 2:
            await run.full()
    chain_proof = await proof.prove(run.bus, run.id, trust(), run.objects.fetch)
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
    chain_proof = await proof.prove(run.bus, run.id, trust(), run.objects.fetch)
    assert chain_proof.versions == 4
    assert ["it was changed" in chain_proof.faults[0], "an old head was stored again" in chain_proof.faults[1]] == [
        True,
        True,
    ]


async def test_who_joins_while_old_versions_are_collected_is_served(run: Run, tmp_path: Path, connect: Connect) -> None:
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
    way = await chain.obtain(
        Joiner(), head, tmp_path / "new", lambda version, hash: None, trust=trust(), fetch=run.objects.fetch
    )
    gone = await collecting
    assert snapshot.file_hash(tmp_path / "new") == head.state_hash and way.manifests[0].version == 7
    assert sorted(gone) == [2], "0 and 1 are what the pinned version needs"
    for version in (1, 3, 4, 9):
        path = tmp_path / str(version)
        await chain.obtain(
            run.bus, run.heads[version], path, lambda version, hash: None, trust=trust(), fetch=run.objects.fetch
        )
        assert snapshot.file_hash(path) == run.heads[version].state_hash
    with pytest.raises(BrokenVersion, match="cannot be built any more"):
        await chain.plan(run.bus, run.heads[2], trust=trust())
    chain_proof = await proof.prove(run.bus, run.id, trust(), run.objects.fetch)
    assert (chain_proof.faults, chain_proof.collected, chain_proof.newest) == ([], 1, 9)
