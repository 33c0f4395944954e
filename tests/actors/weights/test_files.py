"""Full snapshots in a folder that all nodes share, and the removal of files whose chains were collected."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.config import ConfigError, parse
from headrace.messages.evaluation import EvalRequest
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT
from headrace.weights import chain, snapshot
from headrace.weights.publishing import collect
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["file", "peer"])
async def run(request: pytest.FixtureRequest, connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    kind: str = request.param
    shared = str(tmp_path / "shared") if kind == "file" else ""
    out = await WeightRun(connect, tmp_path, full_snapshots=kind, shared_dir=shared, anchor_every=1, keep=2).open()
    out.tensors = model(wide=2000)
    yield out
    await out.close()


def files(run: WeightRun) -> list[int]:
    """The full snapshots that nodes can get, besides the newest version of the sender."""
    if run.config.weights.full_snapshots == "file":
        whole = Path(run.config.weights.shared_dir).rglob("[0-9]*.safetensors")  # a copy under way has a hidden name
        return sorted(int(path.name.partition("-")[0]) for path in whole)
    return sorted(int(path.stem) for path in (run.folder / run.id / "nodes" / "n1" / "sender").glob("*.safetensors"))


async def test_the_files_of_old_chains_go_with_them_and_pins_keep_theirs(run: WeightRun, connect: Connect) -> None:
    sender = await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    for version in range(7):
        await run.train(version)
        await within(PATIENCE_S, run.staged(version))
    policy = PolicyRef("pinned", 3)
    request = EvalRequest(run=run.id, id="e", suite="s", policy=policy, tasks=1)
    await run.bus.publish(EVENT.at(run=run.id, actor="operator", type="eval_request"), request)
    await within(PATIENCE_S, run.event("published", "version 6"))
    trainer = await connect("trainer")
    assert set(files(run)) >= {0, 1, 2, 3, 4, 5}
    pins = await collect.pinned(run.bus, run.id)
    gone = await collect.collect(
        run.bus, lambda subject: trainer.purge(chain.STREAM, subject=subject), run.id, chains=2, pins=pins
    )
    assert sorted(gone) == [0, 1], "version 3 is built from full snapshot 2"
    await run.train(7)
    await within(PATIENCE_S, run.staged(7))
    await sender.shut(5.0)
    await run.actor(WeightSender)  # a restart looks for such files, too
    await run.train(8)
    await within(PATIENCE_S, run.staged(8))
    assert not {0, 1} & set(files(run)) and {2, 4, 5, 6} <= set(files(run))
    joined = await run.actor(WeightReceiver, node="n2")
    pinned = await within(PATIENCE_S, run.staged(3, node="n2"))
    assert snapshot.file_hash(pinned.path) == run.hashes[3]
    assert joined.store.find(8, run.hashes[8]) is not None


async def test_a_sender_removes_the_copy_of_one_that_was_killed(connect: Connect, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run = await WeightRun(connect, tmp_path, full_snapshots="file", shared_dir=str(shared)).open()
    part = shared / run.id / ".0-ab.safetensors.4711.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    os.utime(part, (0.0, 0.0))
    await run.actor(WeightSender)
    assert str(part) in await within(PATIENCE_S, run.event("files_removed")) and not part.exists()
    await run.close()


async def test_a_damaged_file_is_never_served(run: WeightRun) -> None:
    sender = await run.actor(WeightSender)
    await run.train(0)
    await within(PATIENCE_S, run.event("published"))
    place = "shared" if run.config.weights.full_snapshots == "file" else "sender"
    (path,) = [path for path in run.folder.rglob("0*.safetensors") if place in path.parts]
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], b""):
        path.unlink()  # the store's file is a link to the trainer's
        path.write_bytes(damaged)
        receiver = await run.actor(WeightReceiver, node=f"n{len(damaged)}-{damaged[-1:].hex() or 'none'}")
        assert "nobody has" in await within(PATIENCE_S, run.event("no_full_snapshot"))
        await receiver.shut(1.0)
        assert receiver.store.versions() == []
    path.write_bytes(whole)
    await run.actor(WeightReceiver, node="n2")
    staged = await within(PATIENCE_S, run.staged(0, node="n2"))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    await sender.shut(1.0)


async def test_a_receiver_that_is_not_told_where_says_so(run: WeightRun) -> None:
    await run.actor(WeightSender)
    section = msgspec.structs.replace(run.config.weights, full_snapshots="broker", shared_dir="")
    run.config = msgspec.structs.replace(run.config, weights=section)
    await run.actor(WeightReceiver, node="n2")
    await run.train(0)
    text = await within(PATIENCE_S, run.event("stage_failed"))
    assert "is a file on its nodes and no chunks in the stream: set [weights] full_snapshots" in text


def test_a_shared_folder_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"weights\.shared_dir: expected a folder that all nodes share"):
        parse('[weights]\nfull_snapshots = "file"\n')
