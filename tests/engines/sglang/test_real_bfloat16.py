"""The real SGLang server on this CPU, in bfloat16: how far sampler and trainer are apart in the dtype of production."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from headrace.engines.server.engine import OneServer
from headrace.weights import tensor_state
from tests.engines.sglang.test_real import routes
from tests.support import tiny
from tests.support.engines import Record, Versions, request
from tests.support.sglang.requests import begun
from tests.support.sglang.server_fixture import checked, python, real

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

NATS_TOLERANCE = 0.01


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Random weights with a head as flat as a new one: bfloat16 logits of a head four times as sharp differ by 0.02."""
    python()
    made = Versions(tiny.config("bfloat16"), tmp_path_factory.mktemp("versions"), exact=False)
    for index, (model, (path, _)) in enumerate(zip(made.models, made.files, strict=True)):
        with torch.no_grad():
            model.head_weight.mul_(0.25)
        made.files[index] = (path, tensor_state.write(path, model.state()))
    return made


@pytest.fixture(scope="module")
async def engine(
    anyio_backend: object, versions: Versions, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[OneServer]:
    async with real(versions, tmp_path_factory.mktemp("server")) as made:
        yield made


def worst(record: Record, versions: Versions) -> float:
    """Largest |server - our trainer's code| in nats, the recorded routes replayed over carried KV."""
    rows = record.routed()[: len(record.ids) - 1]
    assert (rows >= 0).all()
    scored = record.score(versions, routed=rows)
    return float((scored - scored.new_tensor(record.logprobs)).abs().max())


async def test_turns_are_within_a_hundredth_of_a_nat(engine: OneServer, versions: Versions) -> None:
    assert checked(engine), "its checksums are those of the file"
    gaps, equal = [], []
    for play in range(4):
        record = Record(temperature=1.0)
        for more in (list(range(10 + play, 40 + play)), [5, 6, 7], [8]):
            sample = await engine.sample(request(f"turns{play}", ids=(*record.ids, *more), tokens=24))
            record.add(more, sample, versions.config)
        gaps.append(worst(record, versions))
        ours, theirs = routes(record, versions, engine.version)
        equal.append((ours.sort(-1).values == theirs.sort(-1).values).all(-1).float().mean())
    share = float(torch.stack(equal).mean())
    print(f"largest difference {max(gaps):.5f} nats, routes equal in {share:.4f} of token-layers")
    assert max(gaps) < NATS_TOLERANCE
    assert share > 0.98, "experts of nearly equal score change places in bfloat16; that is why routes are replayed"


async def test_a_swap_in_place_carries_the_old_keys_along(engine: OneServer, versions: Versions) -> None:
    work = asyncio.create_task(engine.sample(request("swap", ids=(11, 12, 13, 14), tokens=768)))
    await begun(engine)
    await versions.load(engine, engine.version + 1)
    sample = await work
    record = Record(temperature=1.0)
    record.add([11, 12, 13, 14], sample, versions.config)
    assert [span.version for span in sample.spans] == [0, 1] and checked(engine)
    gap = worst(record, versions)
    print(f"largest difference {gap:.5f} nats over {len(record.targets)} tokens in two spans")
    assert gap < 2 * NATS_TOLERANCE
