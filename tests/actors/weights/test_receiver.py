"""The receiver over a real broker, fed by a real sender: whole versions, verified, or nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.bus.connection import Bus
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightChunk
from headrace.weights import snapshot
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    out = await WeightRun(connect, tmp_path, anchor_every=3, keep=3).open()
    yield out
    await out.close()


def damage(bus: Bus, times: int) -> list[int]:
    """The next `times` chunks that this bus reads arrive with a flipped bit; returns their sequences as they come."""
    get = bus.get
    seen: list[int] = []

    async def broken(stream: str, seq: int) -> Any:
        received = await get(stream, seq)
        if isinstance(received.message, WeightChunk) and len(seen) < times:
            seen.append(seq)
            data = bytearray(received.message.data)
            data[len(data) // 2] ^= 1
            received._message = msgspec.structs.replace(received.message, data=bytes(data))
        return received

    bus.get = broken  # type: ignore[method-assign]
    return seen


async def test_every_version_arrives_with_the_trainers_hash(run: WeightRun) -> None:
    await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver)
    for version in range(6):
        await run.train(version)
        staged = await within(PATIENCE_S, run.staged(version))
        assert staged.state_hash == run.hashes[version] == snapshot.file_hash(staged.path)
        assert staged.path == str((run.folder / run.id / "nodes/n1/weights" / f"{version}.safetensors").resolve())
    assert receiver.store.versions() == [3, 4, 5]


async def test_a_late_joiner_and_one_that_was_away_catch_up(run: WeightRun) -> None:
    await run.actor(WeightSender)
    first = await run.actor(WeightReceiver)
    await run.train(0)
    await within(PATIENCE_S, run.staged(0))
    await first.shut(1.0)
    for version in range(1, 6):
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
    await run.actor(WeightReceiver)
    late = await run.actor(WeightReceiver, node="n2")
    for node in ("n1", "n2"):
        staged = await within(PATIENCE_S, run.staged(5, node=node))
        assert snapshot.file_hash(staged.path) == run.hashes[5]
    assert late.store.versions() == [5], "what lies between is skipped"


async def test_a_restart_finds_what_is_staged_and_builds_again_what_is_damaged(run: WeightRun) -> None:
    await run.actor(WeightSender)
    first = await run.actor(WeightReceiver)
    await run.train(0)
    staged = await within(PATIENCE_S, run.staged(0))
    await first.shut(1.0)
    inode = Path(staged.path).stat().st_ino
    seq = await run.bus.last_seq("HR_EVENT")
    second = await run.actor(WeightReceiver)
    await within(PATIENCE_S, run.staged(0, start=seq + 1))
    assert "[0]" in await within(PATIENCE_S, run.event("resumed"))
    await second.shut(1.0)
    assert Path(staged.path).stat().st_ino == inode
    data = bytearray(Path(staged.path).read_bytes())
    data[-1] ^= 1
    Path(staged.path).write_bytes(data)
    seq = await run.bus.last_seq("HR_EVENT")
    await run.actor(WeightReceiver)
    await within(PATIENCE_S, run.staged(0, start=seq + 1))
    assert snapshot.file_hash(staged.path) == run.hashes[0]


async def test_chunks_without_a_head_are_not_seen(run: WeightRun) -> None:
    """A sender dies between chunks, manifest and head: no receiver acts until a successor commits."""
    first = await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver)
    await run.train(0)
    await within(PATIENCE_S, run.staged(0))
    publish, reached = first.bus.publish, asyncio.Event()

    async def stall(subject: str, message: Any, **options: Any) -> int:
        if subject.endswith(".head"):
            reached.set()
            await asyncio.Event().wait()
        return await publish(subject, message, **options)

    first.bus.publish = stall  # type: ignore[method-assign]
    await run.train(1)
    await within(PATIENCE_S, reached.wait())
    await first.shut(0.0)
    where = EVENT.where(run=run.id, type="weights_staged")
    assert [r.message.version async for r in run.bus.history("HR_EVENT", where)] == [0]
    assert receiver.store.versions() == [0]
    await run.actor(WeightSender)
    await within(PATIENCE_S, run.staged(1))


async def test_a_damaged_chunk_is_told_and_fetched_again(run: WeightRun) -> None:
    await run.actor(WeightSender)
    bus = await run.connect("weight_sync", node="n1")
    seen = damage(bus, 1)
    await run.actor(WeightReceiver, bus=bus)
    for version in (0, 1):
        await run.train(version)
        staged = await within(PATIENCE_S, run.staged(version))
    assert snapshot.file_hash(staged.path) == run.hashes[1]
    text = await within(PATIENCE_S, run.event("chunk_damaged"))
    assert f"(sequence {seen[0]}) does not match its manifest" in text


async def test_a_chunk_that_stays_damaged_is_an_error_and_the_next_head_heals(run: WeightRun) -> None:
    await run.actor(WeightSender)
    bus = await run.connect("weight_sync", node="n1")
    receiver = await run.actor(WeightReceiver, bus=bus)
    await run.train(0)
    await within(PATIENCE_S, run.staged(0))
    whole = bus.get
    damage(bus, 1000)
    await run.train(1)
    assert "does not match its manifest" in await within(PATIENCE_S, run.event("stage_failed"))
    assert receiver.store.versions() == [0]
    bus.get = whole  # type: ignore[method-assign]
    await run.train(2)
    await within(PATIENCE_S, run.staged(2))
    assert snapshot.file_hash(receiver.store.path(2)) == run.hashes[2]


async def test_a_pinned_version_is_rebuilt_and_kept_while_an_evaluation_needs_it(run: WeightRun) -> None:
    await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver)
    for version in range(5):
        await run.train(version)
        await within(PATIENCE_S, run.staged(version))
    assert receiver.store.versions() == [2, 3, 4]
    curriculum, evaluator = await run.connect("curriculum"), await run.connect("evaluator")
    policy = PolicyRef(kind="pinned", version=1)
    request = EvalRequest(id="e1", run=run.id, suite="s", tasks=1, policy=policy)
    seq = await curriculum.publish(EVENT.at(run=run.id, actor="curriculum", type="eval_request"), request)
    staged = await within(PATIENCE_S, run.staged(1, start=seq))
    assert snapshot.file_hash(staged.path) == run.hashes[1]
    for version in (5, 6):
        await run.train(version)
        await within(PATIENCE_S, run.staged(version))
    assert receiver.store.versions() == [1, 4, 5, 6]
    result = EvalResult(id="e1", run=run.id, suite="s", policy=policy, version=1, tasks=1, passed=1, rate=1.0,
                        infra_failures=0)  # fmt: skip
    await evaluator.publish(EVENT.at(run=run.id, actor="evaluator", type="eval_result"), result)
    version = 6
    while 1 in receiver.store.versions():
        version += 1
        assert version < 12, "the pin is never given up"
        await run.train(version)
        await within(PATIENCE_S, run.staged(version))


async def test_the_senders_node_has_one_file_of_a_version_and_fetches_nothing(connect: Connect, tmp_path: Path) -> None:
    """Trainer, sender, receiver and a server's folder have links to one file in memory; another node builds its own."""
    memory = tmp_path / "memory"
    memory.mkdir()
    run = await WeightRun(connect, tmp_path / "runs", keep=2, memory_dir=str(memory)).open()
    try:
        await run.actor(WeightSender, node="n1")
        near = await run.actor(WeightReceiver, node="n1")
        fetched = damage(near.bus, times=99)
        for version in range(3):
            await run.train(version)
            staged = await within(PATIENCE_S, run.staged(version))
            assert snapshot.file_hash(staged.path) == run.hashes[version]
            assert Path(staged.path).samefile(run.path(version))
        assert not fetched
        inodes = {file.stat().st_ino for file in memory.rglob("*.safetensors")}
        assert inodes == {run.path(version).stat().st_ino for version in range(3)}
        assert not list((tmp_path / "runs").rglob("*.safetensors")), "a file of a version is on the disk"
        far = await run.actor(WeightReceiver, node="n2")
        other = await within(PATIENCE_S, run.staged(2, node="n2"))
        assert snapshot.file_hash(other.path) == run.hashes[2] and far.store.versions() == [2]
        assert not Path(other.path).samefile(run.path(2))
    finally:
        await run.close()


async def test_a_file_of_the_sender_with_other_bits_is_not_taken(run: WeightRun) -> None:
    """Such as one that the disk has damaged: the version is built from the stream instead."""
    sender = await run.actor(WeightSender, node="n1")
    await run.train(0)
    await within(PATIENCE_S, run.head(0))
    data = bytearray(sender.store.path(0).read_bytes())
    data[-1] ^= 1
    sender.store.path(0).unlink()
    sender.store.path(0).write_bytes(data)
    await run.actor(WeightReceiver, node="n1")
    staged = await within(PATIENCE_S, run.staged(0))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
