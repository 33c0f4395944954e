"""Untrained policies that are staged on a node, for tests of a rollout actor with a real engine."""

from pathlib import Path
from typing import Any

import torch

from headrace.bus.connection import Bus
from headrace.bus.payloads import renderer_bundles
from headrace.config import Config, Policy, Production, Run
from headrace.config import Environment as Section
from headrace.messages.rollout import RendererBundle
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.rendering import schemas
from headrace.rendering.bundle import terse_bundle
from headrace.rendering.tokenizer import Tokenizer
from headrace.weights import tensor_state
from tests.conftest import Connect

SHAPE = Policy(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_dim=32, vocab=320)


def config(folder: Path) -> Config:
    return Config(
        run=Run(dir=str(folder)),
        policy=SHAPE,
        environment=Section(backend="process", lease_s=20.0),
        production=Production(enabled=False),
    )


def made(folder: Path) -> dict[int, tuple[str, str]]:
    """Files and state hashes of three untrained policies."""
    torch.set_num_threads(1)
    shape = hugging_face.from_section(SHAPE)
    numerics = probe(shape)
    files = {version: folder / f"{version}.safetensors" for version in range(3)}
    return {
        version: (str(file), tensor_state.write(file, Model(shape, numerics, seed=version).state()))
        for version, file in files.items()
    }


async def prepare(connect: Connect, run: str) -> RendererBundle:
    """Publish the run's bundle as its trainer does; no folder is shared."""
    bundle = terse_bundle(Tokenizer.train((), 256 + len(schemas.tags())).dump())
    await renderer_bundles.publish(await connect("trainer"), run, bundle)
    return bundle


async def stage(bus: Bus, run: str, node: str, version: int, path: str, state_hash: str) -> None:
    staged = WeightsStaged(
        run=run, node=node, region="local", version=version, path=path, state_hash=state_hash, stage_s=0.0
    )
    await bus.publish(EVENT.at(run=run, actor="weight_sync", type="weights_staged"), staged)


async def first(bus: Bus, stream: str, subject: str, wanted: Any) -> Any:
    async for received in bus.follow(stream, subject):
        if wanted(received.message):
            return received.message


def swapped(version: int) -> Any:
    return lambda message: isinstance(message, WeightsSwapped) and message.version == version
