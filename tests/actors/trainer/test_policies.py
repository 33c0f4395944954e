"""Policies of other number formats and architectures through the actor: the sampler's bits, and a replay's."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.actors.trainer.initial_policy import BUNDLE
from headrace.messages.training import StepDone
from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.layout import checkpoint
from headrace.policy.model import Model
from headrace.rendering.bundle import terse_bundle
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from headrace.weights import snapshot
from headrace.weights.tensor_state import state_hash
from tests.conftest import Connect
from tests.support import tiny, world
from tests.support.actors import living
from tests.support.recorded_run import RunFeeder, config, new_run

pytestmark = pytest.mark.anyio

LATENT = Latent(q_rank=20, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=16)
POLICIES: dict[str, PolicyConfig] = {
    "bfloat16": msgspec.structs.replace(world.POLICY, dtype="bfloat16"),
    "dense": msgspec.structs.replace(world.POLICY, experts=0, top_k=0),
    "latent": msgspec.structs.replace(
        world.POLICY,
        kv_heads=2,
        head_dim=20,
        latent=LATENT,
        scores="sigmoid",
        shared_experts=1,
        dense_layers=1,
        dense_dim=48,
    ),
    "mxfp8": msgspec.structs.replace(world.POLICY, dtype="bfloat16", expert_format="mxfp8"),
    "nvfp4": msgspec.structs.replace(world.POLICY, dtype="bfloat16", expert_format="nvfp4"),
}

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["bfloat16", "latent", *(pytest.param(kind, marks=SLOW) for kind in ("dense", "mxfp8", "nvfp4"))]
)
async def test_steps_have_the_bits_of_the_sampler_and_of_a_replay(connect: Connect, tmp_path: Path, kind: str) -> None:
    policy = POLICIES[kind]
    first = Model(policy, tiny.numerics(policy), seed=1)  # of high entropy, so that rewards differ within a group
    checkpoint.save(tmp_path / "model", first, policy)
    make = partial(Model, policy, tiny.numerics(policy), seed=None)
    feeder = RunFeeder(await connect(), new_run(), tmp_path, make)
    (feeder.folder / BUNDLE).write_bytes(msgspec.json.encode(terse_bundle(world.TOKENIZER)))
    settings = config(tmp_path, policy={"checkpoint": str(tmp_path / "model")}, trainer={"checkpoint_every": 10})
    async with living(Trainer, settings, await connect("trainer"), feeder.run):
        await feeder.batch(0)
        await feeder.batch(1)  # a quarter of its tokens is of version 0
        last = await feeder.version(2)
    done = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert [record.step for record in done] == [0, 1], "no step failed"
    assert all(record.max_abs_dlp == 0.0 and record.exact and record.rescored_tokens for record in done), "Law 5"
    assert feeder.hashes[0] == state_hash(first.state()), "version 0 has the checkpoint's bytes"
    assert len(set(feeder.hashes.values())) == 3, "both steps changed the weights"
    assert snapshot.file_hash(last.path) == last.state_hash
    recorded = await of_run(await connect("replay"), settings, feeder.folder, feeder.run)
    assert [line.bitwise_equal async for line in replay_steps(recorded, range(2))] == [True, True]
