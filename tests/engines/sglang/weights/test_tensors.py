"""Versions as tensors: the segments of shared memory, and a server that takes them, refuses them or ends."""

import asyncio
import logging
import struct
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.engines.server.backend import IncompatibleServer
from headrace.engines.server.engine import OneServer
from headrace.engines.server.weights.lock import NotServed
from headrace.engines.sglang import tensors
from headrace.engines.sglang.capabilities import Capabilities
from headrace.engines.sglang.transport import Transport
from headrace.messages.rollout import Span
from headrace.weights import tensor_state
from tests.engines.sglang.weights.test_shards import Sharded
from tests.support import tiny
from tests.support.engines import Record, Versions, request
from tests.support.sglang.cuda import CudaDouble
from tests.support.sglang.double import Double
from tests.support.sglang.opening import sglang_engine
from tests.support.sglang.requests import attached, begun
from tests.support.sglang.updates import load

CONFIG = tiny.config()
UPDATE = "/update_weights_from_tensor"
DISK = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(CONFIG, tmp_path_factory.mktemp("versions"), exact=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of several buckets."""
    monkeypatch.setattr(tensors, "BUCKET", 100_000)


def segments(folder: Path) -> list[Path]:
    """The segments of the engine that stages in `folder`."""
    return list(tensors.SEGMENTS.glob(f"{tensors.prefix(folder)}*"))


def test_torch_maps_the_tensors_of_a_segment(tmp_path: Path) -> None:
    start = tensors.prefix(tmp_path)
    named = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "one": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    segment = tensors.Segment(named, start)
    try:
        for _ in range(2):
            mapped = dict(load(segment.payload()))
            assert list(mapped) == list(named) and segment.content == 7 + 48 + 12 + 4
            for name, tensor in named.items():
                assert mapped[name].dtype == tensor.dtype and torch.equal(mapped[name], tensor), name
            del mapped
        (count,) = struct.unpack("<i", segment.path.read_bytes()[:4])
        assert count == tensors.REFERENCES - 2, "every map lowers the count by one, and nobody deletes the segment"
    finally:
        segment.remove()
    assert not segments(tmp_path)


def test_buckets_have_at_most_so_many_bytes_unless_one_tensor_has_more() -> None:
    named = {str(index): torch.empty(size, dtype=torch.uint8) for index, size in enumerate([40, 60, 10, 300, 1, 2])}
    assert [list(bucket) for bucket in tensors.buckets(named, 100)] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert not list(tensors.buckets({}))


def test_an_engine_deletes_the_segments_that_it_left_when_it_was_killed(versions: Versions, tmp_path: Path) -> None:
    left = [tensors.Segment({"a": torch.ones(3)}, tensors.prefix(tmp_path / name)) for name in ("stage", "other")]
    sglang_engine(CONFIG, tmp_path / "stage", url="http://127.0.0.1:9")
    assert [segment.path.exists() for segment in left] == [False, True]
    left[1].remove()


@pytest.mark.anyio
@pytest.mark.usefixtures("small")
async def test_a_version_is_given_in_buckets_under_running_turns(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, weights="tensor") as (engine, double):
        await double.let_go(hold_at=5)
        work = asyncio.create_task(engine.sample(request(ids=(1, 2, 3, 4), tokens=12)))
        await begun(engine)
        await double.until(lambda: any(len(active.out) == 5 for active in double.running))
        before = len(double.bodies(UPDATE))
        await versions.load(engine, 1)
        await double.let_go()
        sample = await work
        assert sample.spans == (Span(0, 8, 0), Span(8, 15, 1))
        record = Record(temperature=1.0)
        record.add([1, 2, 3, 4], sample, CONFIG)
        scored = record.score(versions)
        assert (scored - scored.new_tensor(record.logprobs)).abs().max() < 1e-4, "all weights are the version's"
        labels = [asked["weight_version"] for asked in double.bodies(UPDATE)[before:]]
        final = f"1-{versions.files[1][1][:16]}"
        assert len(labels) > 2 and labels == [f"{final}.part"] * (len(labels) - 1) + [final]
        assert not any(asked["flush_cache"] for asked in double.bodies(UPDATE)) and not double.bodies(DISK)
        stats = engine.stats()
        assert stats["checked"] and stats["tensor_failures"] == 0 and stats["pause_ms"] > 0
        assert stats["tensor_bytes"] == sum(
            tensor.nbytes for tensor in tensor_state.read(versions.files[1][0]).values()
        )
        assert not segments(tmp_path / "stage") and not double.session


@pytest.mark.anyio
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["refuse", "half", "lie"])
async def test_a_server_that_does_not_take_tensors_loads_the_version_from_disk_and_that_is_said(
    versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with attached(versions, tmp_path, weights="tensor") as (engine, double):
        assert not double.bodies(DISK)
        double.fail_tensors = how
        await versions.load(engine, 1)
        assert engine.version == 1 and not double.paused and not double.session and engine.stats()["checked"]
        why = {"refuse": "out of memory", "half": "partially updated", "lie": "tensors in the server differ"}[how]
        (warning,) = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
        assert why in warning.message and "from now on versions are loaded from disk" in warning.message
        stats = engine.stats()
        assert (stats["tensor_failures"], stats["tensor_bytes"], stats["reloads"]) == (1, 0, 0)
        assert len(double.bodies(DISK)) == 1
        given = len(double.bodies(UPDATE))
        double.fail_tensors = ""
        await versions.load(engine, 2)
        assert len(double.bodies(DISK)) == 2 and len(double.bodies(UPDATE)) == given, "no second failure in a pause"
        assert not segments(tmp_path / "stage")


@pytest.mark.anyio
async def test_a_server_that_ends_while_it_takes_tensors_is_loaded_from_disk_when_it_is_back(
    versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with attached(versions, tmp_path, weights="tensor") as (engine, double):
        double.fail_tensors = "die"
        with pytest.raises(NotServed, match=r"broke the connection|cannot be reached"):
            await versions.load(engine, 1)
        assert "from now on versions are loaded from disk" in caplog.text and not segments(tmp_path / "stage")
        await double.start()
        await versions.load(engine, 1)
        assert engine.version == 1 and len(double.bodies(DISK)) == 1 and engine.stats()["tensor_failures"] == 1


@pytest.mark.anyio
async def test_shared_memory_without_space_means_the_disk_and_no_pause_is_lengthened(
    versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(versions, tmp_path, weights="tensor") as (engine, double):
        monkeypatch.setattr(tensors, "SEGMENTS", tmp_path / "no such folder")
        await versions.load(engine, 1)
        assert engine.version == 1 and engine.stats()["tensor_failures"] == 1 and len(double.bodies(DISK)) == 1
        assert "shared memory cannot be written" in caplog.text
        monkeypatch.undo()
        await versions.load(engine, 2)
        assert engine.stats()["tensor_bytes"] and len(double.bodies(DISK)) == 1, "it is tried again"


@pytest.mark.anyio
async def test_a_session_that_another_client_left_open_is_closed_first(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, weights="tensor") as (engine, double):
        double.session = True
        await versions.load(engine, 1)
        assert engine.stats()["tensor_bytes"] and not double.session
        assert len(double.bodies("/begin_weight_update")) == 3


@pytest.mark.anyio
async def test_a_server_of_the_first_interface_takes_tensors_without_a_session(
    versions: Versions, tmp_path: Path
) -> None:
    double = Double(CONFIG)
    for path in ("/begin_weight_update", "/end_weight_update"):
        del double.openapi["paths"][path]
    async with attached(versions, tmp_path, double=double, weights="tensor") as (engine, _):
        await versions.load(engine, 1)
        assert engine.stats()["tensor_bytes"] and not double.bodies("/begin_weight_update")


@pytest.mark.anyio
async def test_four_ranks_get_a_payload_each(versions: Versions, tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, heads=4, kv_heads=4)
    several = Versions(config, tmp_path, exact=False)
    double = Sharded(config, "cpu", 4)
    async with attached(several, tmp_path, double=double, weights="tensor") as (engine, _):
        await several.load(engine, 1)
        assert [len(asked["serialized_named_tensors"]) for asked in double.bodies(UPDATE)] == [4, 4]
        assert engine.stats()["tensor_bytes"] and engine.stats()["checked"]


@pytest.mark.anyio
async def test_auto_sends_no_tensors_to_a_server_that_it_did_not_start(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, weights="auto") as (engine, double):
        assert not double.bodies(UPDATE) and len(double.bodies(DISK)) == 1
        transport(engine)._started = True
        await versions.load(engine, 1)
        assert double.bodies(UPDATE) and len(double.bodies(DISK)) == 1
        assert engine._life.terms is not None
        engine._life.terms = msgspec.structs.replace(engine._life.terms, device="cuda")
        await versions.load(engine, 2)
        assert len(double.bodies(UPDATE)) == 1 and len(double.bodies(DISK)) == 2, "a GPU was not measured"


@pytest.mark.anyio
async def test_the_first_load_of_a_gpu_is_from_disk_because_it_decides_about_checksums(
    versions: Versions, tmp_path: Path
) -> None:
    double = CudaDouble(CONFIG)
    async with attached(versions, tmp_path, double=double, weights="tensor") as (engine, _):
        assert not double.bodies(UPDATE) and engine.stats()["checked"]


@pytest.mark.anyio
async def test_a_server_that_cannot_take_the_required_tensors_is_refused(versions: Versions, tmp_path: Path) -> None:
    double = Double(CONFIG)
    del double.openapi["paths"][UPDATE]
    with pytest.raises(IncompatibleServer, match=r"weights = 'tensor' needs /update_weights_from_tensor"):
        async with attached(versions, tmp_path, double=double, weights="tensor"):
            pass
    other = sglang_engine(CONFIG, tmp_path / "far", url="http://10.1.2.3:30000", weights="tensor")
    with pytest.raises(IncompatibleServer, match="needs a server on this machine"):
        transport(other).check(Capabilities())
    await other.stop()


def transport(engine: OneServer) -> Transport:
    """Of the engine's backend."""
    (way,) = engine._backend.ways
    assert isinstance(way, Transport)
    return way
