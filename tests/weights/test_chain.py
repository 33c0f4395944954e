"""The chain over a real broker: released, walked, built, repaired; and a sender that slept is refused."""

import asyncio
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.bus.errors import WrongSequence
from headrace.messages import subjects
from headrace.messages.weights import WeightChunk, WeightHead
from headrace.weights import chain, report, snapshot, tensor_state
from headrace.weights.publishing import release
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.publishing.release import Commit
from headrace.weights.receiving.staging import BrokenVersion, DamagedChunk
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError
from tests.conftest import Connect
from tests.support.object_folder import ObjectFolder
from tests.support.weights import model, step

pytestmark = pytest.mark.anyio


class Run:
    """A run whose trainer and sender are this test."""

    def __init__(self, bus: Bus, folder: Path):
        self.bus, self.folder = bus, folder
        self.id = f"r{token_hex(4)}"
        self.objects = ObjectFolder(folder / "objects")
        self.commit: Commit | None = None
        self.tensors = model(wide=40_000)
        self.heads: list[WeightHead] = []

    def path(self, version: int) -> Path:
        return self.folder / f"{version}.safetensors"

    def encoding(self, version: int, *, density: float = 0.01) -> tuple[Encoding, str]:
        if version:
            self.tensors = step(self.tensors, version, density)
        digest = tensor_state.write(self.path(version), self.tensors)
        base = Snapshot(self.path(self.commit.head.version)) if self.commit else None
        return Encoding(Snapshot(self.path(version)), base), digest

    async def publish(self, version: int, *, density: float = 0.01) -> WeightHead:
        encoding, digest = self.encoding(version, density=density)
        new = release.NewVersion(self.id, version, digest, learning_rate=1e-6)
        self.commit = await release.release(self.bus, encoding, new, self.commit, self.objects.keep)
        self.heads.append(self.commit.head)
        return self.commit.head


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> Run:
    return Run(await connect("weight_sync"), tmp_path / "trainer")


class Faulty:
    """The real bus, but what it reads at some sequences is damaged the first few times."""

    def __init__(self, bus: Bus, faults: dict[int, int]):
        self.bus, self.faults = bus, faults
        self.last, self.history = bus.last, bus.history
        self.gets: list[int] = []

    async def get(self, stream: str, seq: int) -> Any:
        received = await self.bus.get(stream, seq)
        self.gets.append(seq)
        if self.faults.get(seq, 0) and isinstance(received.message, WeightChunk):
            self.faults[seq] -= 1
            data = bytearray(received.message.data)
            data[len(data) // 3] ^= 0x10
            received._message = msgspec.structs.replace(received.message, data=bytes(data))
        return received


async def test_a_follower_takes_deltas_and_a_late_joiner_the_full_snapshot(run: Run, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "node")
    for version in range(4):
        head = await run.publish(version)
        assert await chain.head(run.bus, run.id) == (run.commit.seq if run.commit else 0, head)
        way = await chain.obtain(run.bus, head, store.path(version), store.find, fetch=run.objects.fetch)
        store.put(version, head.state_hash)
        assert snapshot.file_hash(store.path(version)) == head.state_hash == snapshot.file_hash(run.path(version))
        assert (len(way.manifests), way.base is None) == (1, version == 0)
    late = await chain.obtain(
        run.bus, run.heads[3], tmp_path / "late", SnapshotStore(tmp_path / "empty").find, fetch=run.objects.fetch
    )
    assert [manifest.version for manifest in late.manifests] == [0, 1, 2, 3]
    assert snapshot.file_hash(tmp_path / "late") == run.heads[3].state_hash
    store.drop([1, 2, 3])
    skipped = await chain.obtain(run.bus, run.heads[3], store.path(3), store.find, fetch=run.objects.fetch)
    assert [manifest.version for manifest in skipped.manifests] == [1, 2, 3]


async def test_a_full_snapshot_beside_a_delta_shortens_the_path_of_a_joiner_only(run: Run, tmp_path: Path) -> None:
    for version in range(3):
        await run.publish(version)
    assert run.commit is not None
    assert not release.full_snapshot_due(run.commit, 3)
    assert release.full_snapshot_due(run.commit, 2)
    run.commit = await release.add_full_snapshot(
        run.bus, Encoding(Snapshot(run.path(2)), None), run.commit, run.objects.keep
    )
    assert not release.full_snapshot_due(run.commit, 2)
    head = await run.publish(3)
    assert (head.full_version, run.commit.manifest.base_version) == (2, 2)
    way = await chain.plan(run.bus, head)
    assert [(m.version, m.base_version) for m in way.manifests] == [(2, -1), (3, 2)]
    await chain.build(run.bus, way, tmp_path / "late", fetch=run.objects.fetch)
    assert snapshot.file_hash(tmp_path / "late") == head.state_hash
    near, far = SnapshotStore(tmp_path / "near"), SnapshotStore(tmp_path / "far")
    near.put(2, run.heads[2].state_hash)
    near.folder.mkdir()
    near.path(2).hardlink_to(run.path(2))
    assert [m.version for m in (await chain.plan(run.bus, head, near.find)).manifests] == [3]
    far.put(0, run.heads[0].state_hash)
    far.folder.mkdir()
    far.path(0).hardlink_to(run.path(0))
    assert [m.version for m in (await chain.plan(run.bus, head, far.find)).manifests] == [1, 2, 3], "deltas are smaller"


async def test_a_node_that_is_far_behind_takes_the_full_snapshot_where_that_is_fewer_bytes(
    run: Run, tmp_path: Path
) -> None:
    store = SnapshotStore(tmp_path / "node")
    await run.publish(0)
    store.take(run.path(0), 0)
    store.put(0, run.heads[0].state_hash)
    for version in range(1, 9):
        await run.publish(version, density=1.0)
    assert run.commit is not None
    run.commit = await release.add_full_snapshot(
        run.bus, Encoding(Snapshot(run.path(8)), None), run.commit, run.objects.keep
    )
    head = await run.publish(9)
    way = await chain.obtain(run.bus, head, store.path(9), store.find, fetch=run.objects.fetch)
    assert [(m.version, m.base_version) for m in way.manifests] == [(8, -1), (9, 8)] and way.base is None
    deltas = await chain.plan(run.bus, run.heads[8], store.find)
    assert len(deltas.manifests) == 8 and deltas.wire_bytes > way.wire_bytes, "the head of version 8 names version 0"
    assert snapshot.file_hash(store.path(9)) == head.state_hash


async def test_a_node_with_a_base_needs_no_full_snapshot(run: Run, tmp_path: Path, connect: Connect) -> None:
    store = SnapshotStore(tmp_path / "node")
    for version in range(3):
        await run.publish(version)
    store.take(run.path(0), 0)
    store.put(0, run.heads[0].state_hash)
    assert run.commit is not None
    run.commit = await release.add_full_snapshot(
        run.bus, Encoding(Snapshot(run.path(2)), None), run.commit, run.objects.keep
    )
    head = await run.publish(3)
    purge = (await connect("trainer")).purge
    full = await chain.manifest(run.bus, run.id, head.full_seq)
    assert await purge(chain.STREAM, subject=subjects.WEIGHT_MANIFEST.at(run=run.id, version=0)) == 1
    assert full.base_version < 0
    way = await chain.plan(run.bus, head, store.find)
    assert [manifest.version for manifest in way.manifests] == [1, 2, 3] and way.base == store.path(0)


async def test_a_chunk_damaged_on_the_way_is_fetched_again(run: Run, tmp_path: Path) -> None:
    await run.publish(0)
    run.tensors = model(seed=2, wide=40_000)
    head = await run.publish(1, density=0.0)
    assert run.commit is not None
    infos = run.commit.manifest.chunks
    assert len(infos) > 3
    told: list[str] = []
    source = Faulty(run.bus, {infos[1].stream_seq: 1, infos[3].stream_seq: 2})
    await chain.obtain(
        source, head, tmp_path / "v", SnapshotStore(tmp_path).find, on_damage=told.append, fetch=run.objects.fetch
    )
    assert snapshot.file_hash(tmp_path / "v") == head.state_hash
    assert [f"chunk {n} of version 1" in text for n, text in zip((1, 3, 3), told, strict=True)] == [True] * 3
    assert source.gets.count(infos[3].stream_seq) == 3


async def test_a_chunk_that_stays_damaged_is_refused_by_name_and_leaves_no_file(run: Run, tmp_path: Path) -> None:
    await run.publish(0)
    run.tensors = model(seed=2, wide=40_000)
    head = await run.publish(1, density=0.0)
    assert run.commit is not None
    info = run.commit.manifest.chunks[2]
    source = Faulty(run.bus, {info.stream_seq: 100})
    with pytest.raises(DamagedChunk, match=rf"chunk 2 of version 1 \(sequence {info.stream_seq}\).*fetched 3 times"):
        await chain.obtain(source, head, tmp_path / "out" / "v", SnapshotStore(tmp_path).find, fetch=run.objects.fetch)
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_broken_local_base_is_not_the_end(run: Run, tmp_path: Path) -> None:
    await run.publish(0)
    head = await run.publish(1)
    store = SnapshotStore(tmp_path / "node")
    store.folder.mkdir()
    data = bytearray(run.path(0).read_bytes())
    data[-7] ^= 1
    store.path(0).write_bytes(data)
    store.put(0, run.heads[0].state_hash)
    told: list[str] = []
    way = await chain.obtain(run.bus, head, store.path(1), store.find, on_damage=told.append, fetch=run.objects.fetch)
    assert "its base or a frame is broken" in told[0]
    assert way.base is None
    assert snapshot.file_hash(store.path(1)) == head.state_hash
    assert SnapshotStore(store.folder).scan()[0] != run.heads[0].state_hash, (
        "after a restart the broken file does not count"
    )


async def test_dying_before_the_head_leaves_nothing_to_see_and_nothing_twice(run: Run) -> None:
    head = await run.publish(0)
    encoding, _ = run.encoding(1)
    first = await release.upload(run.bus, encoding, run.id, 1)
    assert first
    assert await chain.head(run.bus, run.id) == (run.commit.seq if run.commit else 0, head)
    again = await release.upload(run.bus, encoding, run.id, 1)
    assert again == first, "the same chunks, stored once"


async def test_a_cancelled_release_commits_nothing(run: Run) -> None:
    head = await run.publish(0)
    encoding, digest = run.encoding(1, density=0.3)
    at_manifest = asyncio.Event()

    class Stalling:
        async def publish(self, subject: str, message: Any, **options: Any) -> int:
            if subject.endswith(".manifest"):
                at_manifest.set()
                await asyncio.Event().wait()
            return await run.bus.publish(subject, message, **options)

    task = asyncio.create_task(
        release.release(Stalling(), encoding, release.NewVersion(run.id, 1, digest), run.commit, run.objects.keep)
    )
    await at_manifest.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    newest_head = await chain.head(run.bus, run.id)
    assert newest_head is not None and newest_head[1] == head
    where = subjects.WEIGHT_MANIFEST.at(run=run.id, version=1)
    assert await run.bus.last(chain.STREAM, where) is None


async def test_a_sender_that_slept_is_refused_and_its_version_stays_unseen(run: Run, tmp_path: Path) -> None:
    await run.publish(0)
    slept = run.commit
    encoding, digest = run.encoding(1)
    head = await run.publish(2)
    with pytest.raises(WrongSequence):
        await release.release(run.bus, encoding, release.NewVersion(run.id, 1, digest), slept, run.objects.keep)
    newest_head = await chain.head(run.bus, run.id)
    assert newest_head is not None and newest_head[1] == head
    way = await chain.plan(run.bus, head)
    assert [manifest.version for manifest in way.manifests] == [0, 2]
    await chain.build(run.bus, way, tmp_path / "v", fetch=run.objects.fetch)
    assert snapshot.file_hash(tmp_path / "v") == snapshot.file_hash(run.path(2))


async def test_bits_that_are_not_the_announced_ones_are_never_committed(run: Run) -> None:
    await run.publish(0)
    encoding, _ = run.encoding(1)
    with pytest.raises(WeightError, match="the trainer announced 0000"):
        await release.release(run.bus, encoding, release.NewVersion(run.id, 1, "0" * 32), run.commit, run.objects.keep)
    newest_head = await chain.head(run.bus, run.id)
    assert newest_head is not None and newest_head[1].version == 0


async def test_a_head_that_names_something_else_is_refused(run: Run) -> None:
    await run.publish(0)
    head = await run.publish(1)
    assert run.commit is not None
    chunk = run.commit.manifest.chunks[0].stream_seq
    for change, text in (
        ({"manifest_seq": chunk}, "is no manifest"),
        ({"state_hash": "0" * 32}, "names a manifest of version 1"),
        ({"run": "other"}, "is no manifest of run other"),
    ):
        with pytest.raises(BrokenVersion, match=text):
            await chain.plan(run.bus, msgspec.structs.replace(head, **change))


async def test_the_report_tells_the_chain_and_finds_what_is_broken(run: Run) -> None:
    assert "no version" in await report.log(run.bus, run.id)
    for version in range(3):
        await run.publish(version)
    lines = (await report.log(run.bus, run.id)).splitlines()
    assert len(lines) == 4
    assert "full snapshot" in lines[1] and "1 +" in lines[3]
    text = await report.show(run.bus, run.id, 1)
    assert run.heads[1].state_hash in text and "version 0" in text
    good, text = await report.verify(run.bus, run.id, fetch=run.objects.fetch)
    assert good and run.heads[2].state_hash in text
    assert (await report.verify(run.bus, run.id, 9))[0] is False
    assert run.commit is not None
    good, text = await report.verify(
        Faulty(run.bus, {run.commit.manifest.chunks[0].stream_seq: 9}), run.id, fetch=run.objects.fetch
    )
    assert not good and "does not match its manifest" in text
