"""Versions that differ in an adapter alone, and what a server has to do with them."""

import asyncio
from pathlib import Path

import msgspec
import torch

from headrace.engines.server.engine import OneServer
from headrace.policy.adapters import low_rank, shape
from headrace.policy.config import PolicyConfig
from headrace.weights import tensor_state
from tests.support.engines import Record, Versions, request, session
from tests.support.sglang.requests import begun


class Adapters(Versions):
    """Version v has the adapter of seed v mod 4."""

    def __init__(self, plain: PolicyConfig, folder: Path) -> None:
        config = msgspec.structs.replace(plain, adapter=shape.resolved(plain, 4, 8.0, ()))
        super().__init__(config, folder, exact=False)
        under = {name: value for name, value in self.models[0].state().items() if not low_rank.is_published(name)}
        self.files = []
        for seed, model in enumerate(self.models):
            model.load_state(model.state() | under)
            draw = torch.Generator().manual_seed(seed)
            for name, parameter in model.named_parameters():
                if low_rank.is_adapter(name):
                    torch.nn.init.normal_(parameter, std=0.1, generator=draw)
            path = folder / f"adapted{seed}.safetensors"
            self.files.append((str(path), tensor_state.write(path, model.state())))


async def are_served(engine: OneServer, versions: Adapters) -> None:
    """Turns and their log-probabilities are of the version that their spans name, also over a swap and back."""

    async def swap(turn: int) -> None:
        await versions.load(engine, turn)

    record = await session(engine, versions.config, "a", [1, 2, 3], 4, before=swap)
    assert {span.version for span in record.spans} == {0, 1, 2}
    agrees(record, versions)
    versions.models = versions.models[1:] + versions.models[:1]
    assert float((record.score(versions) - torch.tensor(record.logprobs)).abs().max()) > 0.05
    versions.models = versions.models[-1:] + versions.models[:-1]

    work = asyncio.create_task(engine.sample(request(tokens=1500)))
    await begun(engine)
    await versions.load(engine, 3)
    sample = await work
    assert [span.version for span in sample.spans] == [2, 3]
    long = Record(temperature=1.0)
    long.add([1, 2, 3], sample, versions.config)
    agrees(long, versions)


def agrees(record: Record, versions: Versions) -> None:
    torch.testing.assert_close(torch.tensor(record.logprobs), record.score(versions), rtol=0, atol=1e-3)
