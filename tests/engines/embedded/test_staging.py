"""Staging between two steps: what the file stands for is what is served, and models are filled again and again."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from headrace.engines.base import EngineError
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.rollout import PolicyRef
from headrace.policy.config import Dtype
from headrace.weights import snapshot, tensor_state
from headrace.weights.publishing import precision
from tests.engines.embedded.test_engine import until
from tests.support import tiny
from tests.support.engines import Versions, request

pytestmark = pytest.mark.anyio


def made(dtype: Dtype) -> EmbeddedEngine:
    config = tiny.config(dtype)
    return EmbeddedEngine(config, tiny.numerics(config), 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [precision.BF16, precision.MXFP8])
async def test_published_bytes_are_served_as_what_they_stand_for(tmp_path: Path, kind: str, dtype: Dtype) -> None:
    tensor_state.write(tmp_path / "trained", tiny.model(tiny.config()).state())
    digest = precision.publish(tmp_path / "trained", tmp_path / "published", kind)
    shipped = tensor_state.read(tmp_path / "published")
    assert (kind == precision.MXFP8) == any(tensor.dtype == torch.float8_e4m3fn for tensor in shipped.values())
    engine = made(dtype)
    swap = await engine.load(3, str(tmp_path / "published"), digest)
    assert swap.state_hash == digest == snapshot.file_hash(tmp_path / "published")
    latest = engine._worker.latest
    assert latest is not None
    meant, served = precision.restore(shipped), latest.model.state()
    assert set(meant) == set(served)
    assert all(torch.equal(tensor.double(), meant[name].double()) for name, tensor in served.items())
    sample = await engine.sample(request(tokens=20))
    reader = tiny.model(tiny.config(dtype))
    reader.load_state(meant)
    with torch.no_grad():
        ids = torch.tensor([1, 2, 3, *sample.ids])
        hidden = reader(ids, [len(ids)])[2:-1]
    assert torch.equal(reader.selected_logprobs(hidden, ids[3:])[0].detach(), torch.tensor(sample.logprobs))
    await engine.stop()


async def test_no_byte_of_published_weights_is_taken_on_trust(tmp_path: Path) -> None:
    tensor_state.write(tmp_path / "trained", tiny.model(tiny.config()).state())
    digest = precision.publish(tmp_path / "trained", tmp_path / "published", precision.MXFP8)
    file = snapshot.Snapshot(tmp_path / "published")
    whole = bytearray((tmp_path / "published").read_bytes())
    engine = made("float32")
    for dtype in ("F8_E4M3", "U8", "BF16"):
        info = next(info for info in file.tensors if info.dtype == dtype)
        broken = bytearray(whole)
        at = whole.find(file.array(info).tobytes())
        broken[at] ^= 1
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(EngineError, match=f"expected {digest}"):
            await engine.load(1, str(tmp_path / "broken"), digest)
    assert (await engine.load(1, str(tmp_path / "published"), digest)).version == 1
    await engine.stop()


async def test_what_cannot_be_served_as_it_is_is_refused(tmp_path: Path) -> None:
    state = tiny.model(tiny.config()).state()
    trained = tensor_state.write(tmp_path / "trained", state)
    half, whole = made("bfloat16"), made("float32")
    with pytest.raises(EngineError, match="published in F32, which an engine of bfloat16 cannot serve"):
        await half.load(1, str(tmp_path / "trained"), trained)
    eight = dict(state)
    name = "model.layers.0.self_attn.q_proj.weight"
    eight[name], scale = precision.quantise(state[name])
    lonely = tensor_state.write(tmp_path / "lonely", eight)
    with pytest.raises(
        EngineError, match=f"1 tensors are missing and 0 are not of this model; the first is {name}_scale"
    ):
        await half.load(1, str(tmp_path / "lonely"), lonely)
    few = tensor_state.write(tmp_path / "few", eight | {f"{name}_scale": scale[:, :1]})
    with pytest.raises(EngineError, match="expected one scale of one byte per 32"):
        await whole.load(1, str(tmp_path / "few"), few)
    cut = tensor_state.write(tmp_path / "cut", state | {name: state[name][:-1]})
    with pytest.raises(EngineError, match="expected shape"):
        await whole.load(1, str(tmp_path / "cut"), cut)
    grid = tiny.config(expert_format="mxfp8")
    strict = EmbeddedEngine(grid, tiny.numerics(grid), 4)
    with pytest.raises(EngineError, match=r"experts\..* is published in F32, which an engine of mxfp8 experts"):
        await strict.load(1, str(tmp_path / "trained"), trained)
    for engine in (half, whole, strict):
        assert engine.version == -1
        await engine.stop()


async def test_a_model_that_nobody_serves_is_filled_again_and_no_other(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path)
    engine = versions.engine(max_batch=4)
    await versions.load(engine, 0)
    await engine.pin(0, *versions.files[0])
    alone = await engine.sample(request("alone", tokens=120, policy=PolicyRef("pinned", 0)))
    running = asyncio.create_task(engine.sample(request("running", tokens=120, policy=PolicyRef("pinned", 0))))
    await until(engine, 130)
    await engine.unpin(0)
    shells = set()
    for version in range(1, 6):
        await versions.load(engine, version)
        latest = engine._worker.latest
        assert latest is not None
        shells.add(id(latest.shell))
        tensors = versions.model(version).state()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in latest.model.state().items())
    assert len(shells) == 2, "two take turns"
    assert (await running).ids == alone.ids, "the pinned one was left alone"
    await engine.stop()


async def test_a_stop_answers_who_is_staging(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path)
    engine = versions.engine()
    held, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(held.set)
        go.wait()

    engine._worker.post(hold)
    await held.wait()
    load = asyncio.create_task(versions.load(engine, 0))
    stop = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(EngineError, match="stopped"):
        await load
    await stop
