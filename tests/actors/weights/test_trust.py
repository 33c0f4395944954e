"""Sender and receiver over a real broker: signed versions, forged heads, shards and rounded weights."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.bus.broker import credentials, keys
from headrace.config import Weights
from headrace.messages.subjects import WEIGHT_HEAD
from headrace.weights import chain, proof, shards, snapshot, tensor_state
from headrace.weights.publishing import precision
from headrace.weights.signing import Trust, sealed
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    out = await WeightRun(connect, tmp_path).open()
    out.tensors = model(wide=2000)
    yield out
    await out.close()


def configure(run: WeightRun, **weights: object) -> None:
    run.config = msgspec.structs.replace(run.config, weights=Weights(**weights))  # type: ignore[arg-type]


async def test_versions_are_signed_and_forged_heads_change_nothing(run: WeightRun) -> None:
    sender = await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver)
    await run.train(0)
    await within(PATIENCE_S, run.staged(0))
    head = (await run.heads())[0]
    trust = Trust.load(run.bus.credentials)
    trust.check(head)
    manifest = await chain.manifest(run.bus, run.id, head.manifest_seq, trust)
    assert manifest.signer == head.signer != ""
    bus = await run.connect("weight_sync")
    where = WEIGHT_HEAD.at(run=run.id)
    forged = msgspec.structs.replace(head, version=7)
    strangers = sealed(msgspec.structs.replace(head, version=8), keys.Key.make())
    for message in (forged, msgspec.structs.replace(head, version=9, signature=b"", signer=""), strangers, head):
        await bus.publish(where, message)
    for text in ("it was changed", "is not signed", "not among [weights] publishers", "an old head was stored again"):
        await within(PATIENCE_S, run.event("head_refused", text))
    assert receiver.store.versions() == [0]
    # The sender wrote on top of a head that is the last no more: it fails, and its successor goes on after the forged.
    await sender.shut(1.0)
    await run.actor(WeightSender)
    await run.train(1)
    staged = await within(PATIENCE_S, run.staged(1))
    assert snapshot.file_hash(staged.path) == run.hashes[1]
    chain_proof = await proof.prove(run.bus, run.id, trust, run.fetch)
    assert (chain_proof.versions, chain_proof.newest, len(chain_proof.faults)) == (2, 1, 4)


async def test_what_nobody_signed_is_refused_until_the_configuration_says_so(run: WeightRun) -> None:
    bus = await run.connect("weight_sync", node="n1")
    bus.credentials = None
    await run.actor(WeightSender, bus=bus)
    assert "versions go out unsigned" in await within(PATIENCE_S, run.event("unsigned"))
    receiver = await run.actor(WeightReceiver)
    await run.train(0)
    text = await within(PATIENCE_S, run.event("head_refused"))
    assert "the head of version 0" in text and "[weights] unsigned = true" in text
    assert receiver.store.versions() == []
    configure(run, unsigned=True)
    await run.actor(WeightReceiver, node="n2")
    assert (await within(PATIENCE_S, run.staged(0, node="n2"))).state_hash == run.hashes[0]


async def test_a_node_stages_its_own_shards_and_finds_them_again(run: WeightRun) -> None:
    configure(run, shards=3, want=("layers.0.norm",), codec="d10-zstd")
    await run.actor(WeightSender)
    receiver = await run.actor(WeightReceiver)
    for version in range(2):
        await run.train(version)
        staged = await within(PATIENCE_S, run.staged(version))
    head = (await run.heads())[-1]
    manifest = await chain.manifest(run.bus, run.id, head.manifest_seq)
    node_shards = shards.holding(manifest.tensors, ["layers.0.norm"])
    assert (
        staged.state_hash
        == shards.state_hash(manifest, node_shards)
        == snapshot.file_hash(staged.path)
        != head.state_hash
    )
    assert set(tensor_state.read(staged.path)) == {
        info.name for info in manifest.tensors if info.shard in (node_shards or ())
    }
    await receiver.shut(1.0)
    again = await run.actor(WeightReceiver)
    await run.train(2)
    await within(PATIENCE_S, run.staged(2))
    assert again.store.versions() == [1, 2]


async def test_rounded_weights_are_published_as_configured(run: WeightRun) -> None:
    configure(run, precision="mxfp8")
    sender = await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    for version in range(3):
        await run.train(version)
        staged = await within(PATIENCE_S, run.staged(version))
    served = run.folder / "served"
    wanted = precision.publish(run.path(2), served, "mxfp8")
    assert staged.state_hash == wanted == snapshot.file_hash(staged.path)
    head = (await run.heads())[-1]
    assert (head.source_hash, head.state_hash) == (run.hashes[2], wanted)
    await sender.shut(1.0)
    await run.actor(WeightSender)
    await run.train(3)
    await within(PATIENCE_S, run.staged(3))
    assert [head.version for head in await run.heads()] == [0, 1, 2, 3], "nothing was published twice"


async def test_the_publishers_key_lies_with_the_credentials(run: WeightRun) -> None:
    folder = run.bus.credentials
    assert folder is not None
    key = keys.load(folder, credentials.PUBLISHER)
    assert key is not None and (folder / "weight_publisher.pub").read_text().strip() == key.public
