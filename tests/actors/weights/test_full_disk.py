"""A receiver on a real file system that is full: it drops what it does not need, and goes on when there is space."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.messages.subjects import EVENT
from headrace.weights import snapshot
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within

pytestmark = pytest.mark.anyio
FILE = 2_700_000
"""Bytes of a version's file, rounded up."""


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    out = await WeightRun(connect, tmp_path, keep=3).open()
    yield out
    await out.close()


@pytest.fixture
def disk(run: WeightRun) -> Iterator[Path]:
    """A file system of three versions and a half for node n2."""
    folder = run.folder / run.id / "nodes" / "n2"
    folder.mkdir(parents=True)
    size = f"size={int(3.5 * FILE) >> 10}k"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "small", str(folder)], capture_output=True).returncode:
        pytest.skip("needs root and a kernel that mounts tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def kinds(run: WeightRun) -> list[str]:
    """The kinds of the receiver's events so far."""
    where = EVENT.where(run=run.id, type="event")
    return [r.message.kind async for r in run.bus.history("HR_EVENT", where) if r.message.actor == "weight_receiver"]


async def test_a_disk_that_is_too_small_for_one_more_version_gives_up_the_oldest(run: WeightRun, disk: Path) -> None:
    await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver, node="n2")
    for version in range(7):
        await run.train(version)
        staged = await within(PATIENCE_S, run.staged(version, node="n2"))
        assert snapshot.file_hash(staged.path) == run.hashes[version]
    assert receiver.store.versions()[-3:] == [4, 5, 6]
    assert await kinds(run) == ["disk_small"], "one warning, with the first version"


async def test_a_full_disk_is_one_event_and_staging_goes_on_when_there_is_space(
    run: WeightRun, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.weight_receiver.AGAIN_S", 0.05)
    ballast = disk / "ballast"
    await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver, node="n2")
    for version in range(2):
        await run.train(version)
        await within(PATIENCE_S, run.staged(version, node="n2"))
    receiver._full._first = receiver._full._most = receiver._full.delay = 3600.0  # the pause does not end in this test
    ballast.write_bytes(b"\1" * int(1.2 * FILE))
    await run.train(2)
    text = await within(PATIENCE_S, run.event("disk_full"))
    assert "version 2 needs 26258" in text and "lower [weights] keep (3)" in text and str(disk) in text
    for version in (3, 4):  # new heads do not make it write the same event again
        await run.train(version)
        await within(PATIENCE_S, run.head(version))
    ballast.unlink()
    staged = await within(PATIENCE_S, run.staged(4, node="n2"))
    assert snapshot.file_hash(staged.path) == run.hashes[4]
    assert (await kinds(run)).count("disk_full") == 1
    assert receiver.store.versions()[-2:] == [1, 4]
    assert not [path.name for path in receiver.store.folder.iterdir() if path.name.startswith(".")]


async def test_a_node_that_joins_with_a_full_disk_leaves_nothing_and_begins_when_there_is_space(
    run: WeightRun, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.weight_receiver.AGAIN_S", 0.05)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\1" * (3 * FILE))
    await run.actor(WeightSender)
    await run.train(0)
    receiver = await run.actor(WeightReceiver, node="n2")
    await within(PATIENCE_S, run.event("disk_full"))
    assert list(receiver.store.folder.iterdir()) == []
    ballast.unlink()
    staged = await within(PATIENCE_S, run.staged(0, node="n2"))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert (await kinds(run)).count("disk_full") == 1
