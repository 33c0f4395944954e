"""The sender over a real broker: it skips to the newest version, survives a kill at any point, and is refused after a
pause in which another one published."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.weight_sender import WeightSender
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import Unrecoverable, WrongSequence
from headrace.bus.nats.streams import declare
from headrace.messages.base import Message
from headrace.messages.subjects import WEIGHT_MANIFEST
from headrace.weights import chain, report
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    out = await WeightRun(connect, tmp_path, anchor_every=3).open()
    yield out
    await out.close()


class Gate:
    """Holds a bus's publishing to a kind of subject until it is opened."""

    def __init__(self, bus: Bus, ending: str):
        self.bus, self.ending = bus, ending
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self._publish = bus.publish
        bus.publish = self.publish  # type: ignore[method-assign]

    async def publish(self, subject: str, message: Message, **options: Any) -> int:
        if subject.endswith(self.ending):
            self.reached.set()
            await self.open.wait()
        return await self._publish(subject, message, **options)


async def test_versions_become_a_full_snapshot_and_deltas(run: WeightRun) -> None:
    sender = await run.actor(WeightSender)
    for version in range(6):
        await run.train(version)
        head = await within(PATIENCE_S, run.head(version))
        assert head.state_hash == run.hashes[version]
        run.path(version).unlink()
    assert [head.full_version for head in await run.heads()] == [0, 0, 0, 0, 3, 3], "a full snapshot after three"
    await within(PATIENCE_S, run.event("published", "version 5:"))
    assert sender.store.versions() == [5], "links to old files are given up"
    good, text = await report.verify(run.bus, run.id, fetch=run.fetch)
    assert good, text
    assert "from full snapshot 3 through 2 deltas" in text


async def test_it_skips_to_the_newest(run: WeightRun) -> None:
    bus = await run.connect("weight_sync", node="n1")
    gate = Gate(bus, ".head")
    await run.actor(WeightSender, bus=bus)
    await run.train(0)
    await within(PATIENCE_S, gate.reached.wait())
    for version in range(1, 5):
        await run.train(version)
    for version in range(1, 4):
        run.path(version).unlink()
    last = await bus.last("HR_EVENT", f"hr.event.{run.id}.trainer.snapshot_ready")
    assert last is not None and last.message.version == 4
    gate.open.set()
    await within(PATIENCE_S, run.head(4))
    versions = [head.version for head in await run.heads()]
    assert versions[0] == 0 and versions[-1] == 4 and len(versions) < 5


async def test_the_same_version_is_not_published_twice_and_old_bytes_are_an_empty_delta(run: WeightRun) -> None:
    await run.actor(WeightSender)
    ready = run.write(0)
    await run.announce(ready)
    await run.announce(ready)
    await within(PATIENCE_S, run.head(0))
    await run.announce(ready)
    await run.train(1, same=True)
    head = await within(PATIENCE_S, run.head(1))
    assert head.state_hash == run.hashes[0]
    assert [head.version for head in await run.heads()] == [0, 1]
    manifest = await chain.manifest(run.bus, run.id, head.manifest_seq)
    assert (manifest.chunks, manifest.changed) == ((), 0)


@pytest.mark.parametrize("ending", [".0", ".manifest", ".head"])
@pytest.mark.parametrize("files", ["kept", "lost"])
async def test_killed_before_the_commit_a_successor_publishes_it(run: WeightRun, ending: str, files: str) -> None:
    first = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.head(0))
    gate = Gate(first.bus, ending)
    await run.train(1)
    await within(PATIENCE_S, gate.reached.wait())
    await first.shut(0.0)
    assert [head.version for head in await run.heads()] == [0], "nothing of version 1 is to be seen"
    if files == "lost":
        run.path(0).unlink()
        for file in first.store.folder.iterdir():
            file.unlink()
    await run.actor(WeightSender)
    head = await within(PATIENCE_S, run.head(1))
    assert head.state_hash == run.hashes[1]
    manifest = await chain.manifest(run.bus, run.id, head.manifest_seq)
    assert manifest.base_version == 0, "a delta, though the base had to be rebuilt" if files == "lost" else ""
    if files == "lost":
        assert "version 0" in await within(PATIENCE_S, run.event("base_rebuilt"))


async def test_killed_after_the_commit_nothing_is_published_again(run: WeightRun) -> None:
    first = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.head(0))
    await first.shut(0.0)
    await run.actor(WeightSender)
    await run.train(1)
    await within(PATIENCE_S, run.head(1))
    assert [head.version for head in await run.heads()] == [0, 1]


async def test_a_sender_that_slept_is_refused_by_the_expected_sequence(run: WeightRun) -> None:
    bus = await run.connect("weight_sync", node="n1")
    sleeper = await run.actor(WeightSender, bus=bus)
    await run.train(0)
    await within(PATIENCE_S, run.head(0))
    gate = Gate(bus, ".head")
    await run.train(1)
    await within(PATIENCE_S, gate.reached.wait())
    await run.actor(WeightSender, node="n2")
    await run.train(2)
    await within(PATIENCE_S, run.head(2))
    gate.open.set()
    error = await within(PATIENCE_S, asyncio.shield(sleeper.failed))
    assert isinstance(error, WrongSequence)
    heads = await run.heads()
    assert [head.state_hash for head in heads] == [run.hashes[head.version] for head in heads]
    assert heads[-1].version == 2
    good, text = await report.verify(run.bus, run.id, fetch=run.fetch)
    assert good, text


async def test_a_file_that_is_not_what_was_announced_is_refused_and_the_next_one_goes(run: WeightRun) -> None:
    sender = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.head(0))
    ready = run.write(1)
    data = bytearray(run.path(1).read_bytes())
    data[-3] ^= 4
    run.path(1).write_bytes(data)
    await run.announce(ready)
    assert "version 1" in await within(PATIENCE_S, run.event("snapshot_refused"))
    await run.train(2)
    await within(PATIENCE_S, run.event("published", "version 2:"))
    assert [head.version for head in await run.heads()] == [0, 2]
    assert [file.name for file in sender.store.folder.iterdir()] == ["2.safetensors"]


async def test_a_path_outside_of_the_runs_is_not_opened_and_no_file_is_replaced(run: WeightRun, tmp_path: Path) -> None:
    sender = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.event("published", "version 0:"))
    outside = tmp_path.parent / f"{tmp_path.name}.safetensors"
    outside.write_bytes(run.path(0).read_bytes())
    forged = run.write(0, same=True)
    for path in (
        str(outside),
        "/proc/self/environ",
        str(tmp_path / ".." / outside.name),
        f"{run.path(0)}\0",
        "/dev/zero",
    ):
        await run.announce(msgspec.structs.replace(forged, path=path, state_hash="0" * 32))
    ready = run.write(1)
    await run.announce(msgspec.structs.replace(ready, path=str(outside)))
    assert "version 1: expected a file .safetensors below" in await within(
        PATIENCE_S, run.event("snapshot_refused", "version 1")
    )
    held = [file.name for file in sender.store.folder.iterdir()]
    assert held == ["0.safetensors"] and sender.store.find(0, run.hashes[0]) is not None
    assert outside.stat().st_nlink == 1, "no link of it was made"
    await run.announce(ready)
    await within(PATIENCE_S, run.event("published", "version 1:"))
    outside.unlink()


async def test_the_same_number_with_other_bits_is_a_new_incarnation(run: WeightRun) -> None:
    await run.actor(WeightSender)
    await run.train(0)
    await run.train(1)
    await within(PATIENCE_S, run.head(1))
    run.path(1).unlink()
    again = run.write(1, density=0.02)
    await run.announce(again)
    async for received in run.bus.follow("HR_WEIGHTS", f"hr.weights.{run.id}.head"):
        if received.message.state_hash == again.state_hash:
            break
    good, text = await report.verify(run.bus, run.id, fetch=run.fetch)
    assert good and again.state_hash in text


async def test_a_base_that_is_lost_after_a_full_snapshot_is_built_again(run: WeightRun) -> None:
    """A sender that was stopped and woke up removes a file that its successor on the same node needs."""
    sender = await run.actor(WeightSender)
    for version in range(4):
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
    async for received in run.bus.follow("HR_WEIGHTS", WEIGHT_MANIFEST.where(run=run.id, version=3)):
        if received.message.base_version < 0:
            break
    sender.store.drop([3])
    await run.train(4)
    head = await within(PATIENCE_S, run.head(4))
    assert (head.full_version, head.state_hash) == (3, run.hashes[4])
    assert "version 3 was built again" in await within(PATIENCE_S, run.event("base_rebuilt"))


@pytest.mark.parametrize("known_by", ["configuration", "first file", "chain"])
async def test_a_stream_that_cannot_hold_the_chains_is_refused_with_what_to_set(tmp_path: Path, known_by: str) -> None:
    async with Server(tmp_path / "broker") as server:
        opened: list[Bus] = []

        async def connect(role: str = "admin", **options: Any) -> Bus:
            opened.append(await Bus.connect(server.url, role=role, credentials=server.credentials, **options))
            return opened[-1]

        admin = await connect()
        await declare(admin)
        run = await WeightRun(connect, tmp_path, collect_chains=2, anchor_every=4).open()
        missing = msgspec.structs.replace(run.config.policy, checkpoint="/nowhere/else")
        if known_by != "configuration":  # the checkpoint is on another machine
            run.config = msgspec.structs.replace(run.config, policy=missing)
        if known_by == "chain":
            sender = await run.actor(WeightSender)
            await run.train(0)
            await within(PATIENCE_S, run.head(0))
            await sender.shut(1.0)
        await declare(admin, sizes={"HR_WEIGHTS": 300_000})
        sentence = (
            r"the stream HR_WEIGHTS may hold 300000 bytes, and the run needs \d+ there: 3 chains of deltas to versions "
            r"of \d+ bytes; set bus\.stream_gib\.weights"
        )
        if known_by == "first file":
            sender = await run.actor(WeightSender)
            await run.train(0)
            error = await within(PATIENCE_S, sender.failed)
            assert isinstance(error, Unrecoverable) and re.fullmatch(sentence, str(error))
            assert await run.heads() == []
        else:
            with pytest.raises(Unrecoverable, match=sentence):
                await run.actor(WeightSender)
        await run.close()
        for bus in opened:
            await bus.close()


async def full_snapshots(run: WeightRun, version: int) -> int:
    """Number of full snapshots of a version in the stream."""
    where = WEIGHT_MANIFEST.at(run=run.id, version=version)
    return sum([r.message.base_version < 0 async for r in run.bus.history("HR_WEIGHTS", where)])


async def test_a_sender_that_dies_between_head_and_full_snapshot_publishes_it_after_its_restart(
    run: WeightRun, connect: Connect
) -> None:
    bus = await connect("weight_sync", node="n1")
    sender = await run.actor(WeightSender, bus=bus)
    for version in range(3):
        await run.train(version)
        await within(PATIENCE_S, run.event("published", f"version {version}:"))
    gate = Gate(bus, "nothing")
    count = 0
    publish = gate._publish

    async def dying(subject: str, message: Message, **options: Any) -> int:
        """The second manifest of version 3, that of its full snapshot, is never stored."""
        nonlocal count
        if subject.endswith("3.manifest"):
            count += 1
            if count == 2:
                gate.reached.set()
                await asyncio.Event().wait()
        return await publish(subject, message, **options)

    bus.publish = dying  # type: ignore[method-assign]
    await run.train(3)
    await within(PATIENCE_S, gate.reached.wait())
    assert [head.version for head in await run.heads()] == [0, 1, 2, 3]
    await sender.shut(0.0)
    assert await full_snapshots(run, 3) == 0
    again = await run.actor(WeightSender)
    async for received in run.bus.follow("HR_WEIGHTS", WEIGHT_MANIFEST.where(run=run.id, version=3)):
        if received.message.base_version < 0:
            break
    await again.shut(1.0)
    third = await run.actor(WeightSender)  # it finds the snapshot that no head names, and publishes no other
    await run.train(4)
    head = await within(PATIENCE_S, run.head(4))
    assert (head.full_version, head.state_hash) == (3, run.hashes[4])
    assert await full_snapshots(run, 3) == 1
    assert third.commit is not None and third.commit.since_full == third.commit.manifest.wire_bytes


async def test_a_restart_knows_the_bytes_since_the_full_snapshot(run: WeightRun) -> None:
    first = await run.actor(WeightSender)
    for version in range(3):
        await run.train(version)
        await within(PATIENCE_S, run.event("published", f"version {version}:"))
    before = first.commit
    await first.shut(1.0)
    again = await run.actor(WeightSender)
    assert before is not None and again.commit is not None
    assert before.since_full == again.commit.since_full > again.commit.manifest.wire_bytes > 0
