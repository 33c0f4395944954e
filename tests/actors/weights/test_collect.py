"""Old chains are removed after full snapshots; a receiver that joins and a pinned version lose nothing."""

from pathlib import Path
from secrets import token_hex

import pytest
import torch

from headrace.actors.trainer import old_weights
from headrace.actors.trainer.actor import Trainer
from headrace.actors.weight_receiver import WeightReceiver
from headrace.actors.weight_sender import WeightSender
from headrace.bus.nats.ordered_reader import OrderedReader
from headrace.config import ConfigError, parse
from headrace.messages.base import Message
from headrace.messages.codec import decode
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.operations import BlobRef
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT, WEIGHT_MANIFEST
from headrace.weights import chain, proof, snapshot
from headrace.weights.receiving.staging import BrokenVersion
from headrace.weights.signing import Trust
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio


class Collector(Trainer):
    """The trainer's garbage collection alone."""

    async def start(self) -> None:
        self.spawn(old_weights.forget(self), "old weights")


async def collected(run: WeightRun, version: int) -> None:
    """Wait until a version cannot be built any more, and a collection as far as this version has ended: it removes
    payloads last."""
    head = (await run.heads())[version]
    async for received in run.bus.follow("HR_EVENT", EVENT.where(run=run.id, type="event")):
        event = received.message
        if event.kind == "weights_collected" and int(event.text.partition(" to ")[2].partition(":")[0]) >= version:
            try:
                await chain.plan(run.bus, head)
            except BrokenVersion:
                return


async def with_full_snapshot(run: WeightRun, version: int) -> None:
    """Wait until the manifest of a version's full snapshot follows the one of its delta."""
    stored = 0
    async for _ in run.bus.follow("HR_WEIGHTS", WEIGHT_MANIFEST.at(run=run.id, version=version)):
        stored += 1
        if stored == 2:
            return


async def test_old_chains_are_collected_as_full_snapshots_are_published(connect: Connect, tmp_path: Path) -> None:
    run = await WeightRun(connect, tmp_path, anchor_every=1, collect_chains=2).open()
    run.tensors = model(wide=2000)

    async def say(message: Message) -> None:
        kind = message.type_name
        bus = run.bus if isinstance(message, EvalRequest) else await connect("evaluator")
        await bus.publish(EVENT.at(run=run.id, actor=bus.role, type=kind), message)

    await run.actor(WeightSender)
    await run.actor(WeightReceiver)
    trainer = await run.actor(Collector, bus=await connect("trainer"))
    await run.train(0)
    await within(PATIENCE_S, run.staged(0))
    await say(EvalRequest(run=run.id, id="e", suite="s", policy=PolicyRef("pinned", 1), tasks=1))
    for version in range(1, 6):
        await run.train(version)
        staged = await within(PATIENCE_S, run.staged(version))
    await within(PATIENCE_S, collected(run, 2))
    await run.actor(WeightReceiver, node="n2")
    joined = await within(PATIENCE_S, run.staged(5, node="n2"))
    assert snapshot.file_hash(joined.path) == snapshot.file_hash(staged.path) == run.hashes[5]
    pinned = await within(PATIENCE_S, run.staged(1, node="n2"))
    assert snapshot.file_hash(pinned.path) == run.hashes[1], "an open evaluation names it"
    gone = {"tasks": 1, "passed": 1, "rate": 1.0, "infra_failures": 0}
    await say(EvalResult(run=run.id, id="e", suite="s", policy=PolicyRef("pinned", 1), version=1, **gone))  # type: ignore[arg-type]
    # A restart goes through the old ones again, and finds them free.
    await trainer.shut(1.0)
    await run.actor(Collector, bus=await connect("trainer"))
    await within(PATIENCE_S, collected(run, 1))
    chain_proof = await proof.prove(run.bus, run.id, Trust.load(run.bus.credentials), run.fetch)
    assert (chain_proof.newest, chain_proof.faults) == (5, []) and chain_proof.collected >= 3
    await run.close()


async def test_the_payloads_of_large_manifests_go_with_them(connect: Connect, tmp_path: Path) -> None:
    run = await WeightRun(connect, tmp_path, anchor_every=1, collect_chains=2).open()
    run.tensors = {token_hex(500): torch.full((2,), float(number)) for number in range(1200)}
    before = await run.bus.subjects("HR_BLOB", "hr.blob.>")

    async def payloads() -> set[str]:
        """The blobs of this run's manifests that are in the stream."""
        out = set()
        where = WEIGHT_MANIFEST.where(run=run.id)
        async for message, _ in OrderedReader(
            run.bus.connection, "HR_WEIGHTS", [where], until=await run.bus.last_seq("HR_WEIGHTS")
        ).messages():
            ref = decode(message.data, message.headers)
            assert isinstance(ref, BlobRef), "expected a manifest of more than a mebibyte"
            out |= {f"hr.blob.{ref.sha256}.{n}" for n in range(ref.chunks)}
        return out

    await run.actor(WeightSender)
    await run.actor(Collector, bus=await connect("trainer"))
    for version in range(5):
        await run.train(version)
        await within(PATIENCE_S, run.event("published", f"version {version}:"))
    await within(PATIENCE_S, collected(run, 1))
    await within(PATIENCE_S, with_full_snapshot(run, 4))  # a sender that ends before leaves a payload without a record
    await run.close()
    left = set(await run.bus.subjects("HR_BLOB", "hr.blob.>")) - set(before)
    assert left == await payloads() and len(left) >= 6


def test_one_chain_is_too_few() -> None:
    assert parse("[weights]\ncollect_chains = 2\n").weights.collect_chains == 2
    with pytest.raises(ConfigError, match=r"weights\.collect_chains: expected 0 or at least 2"):
        parse("[weights]\ncollect_chains = 1\n")
