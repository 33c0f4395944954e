"""Checksums of a server on a GPU: the function itself, and the first load that decides whether they are compared."""

import asyncio
import hashlib
import itertools
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.engines.base import EngineError, Sample
from headrace.engines.server.engine import OneServer
from headrace.engines.server.weights import checksums
from headrace.engines.sglang import cuda_digest
from tests.support import tiny
from tests.support.engines import Versions, request
from tests.support.sglang import opening
from tests.support.sglang.cuda import CudaDouble
from tests.support.sglang.opening import sglang_engine
from tests.support.sglang.requests import attached, begun

GOLDEN = {
    0: "0000000000000000",
    1: "3d93a6540b54ef2a",
    2: "5de24c68444c9bd7",
    3: "51149183e38a914a",
    4: "cf71907bfb2700ad",
    5: "d7e08a2cc4f0f282",
    7: "6b2b9a1dd96491f5",
    1023: "fb565e8dd87e341b",
    32768: "04f64f1abb4f0657",
    32769: "eaf3ca452669fb29",
    65538: "1abea081209e60fb",
    524288: "dcf3e92714bcdb44",
    524289: "8c29fac1f24ffac1",
    622598: "7e4d71b0c18196d6",
    4194310: "2f9358f2aa12b094",
}
"""Number of bytes of `pattern` to checksum. Computed by the kernels of SGLang 0.5.23
(sglang/kernels/ops/memory/gpu_tensor_hash.py) in Triton 3.7.1's interpreter (TRITON_INTERPRET=1) on a CPU; its source
returns 0 for no bytes. A tile has 32,768 bytes, a block of `cuda_digest` 524,288."""
EXPERTS = "model.layers.0.mlp.experts.w13_weight"


def pattern(size: int) -> torch.Tensor:
    """Bytes that a formula gives, so that no random generator has to stay the same."""
    index = np.arange(size, dtype=np.uint64)
    return torch.from_numpy((index * index * 31 + index * 7 + 3 >> 3 & 255).astype(np.uint8))


@pytest.mark.parametrize("size", GOLDEN)
def test_the_digest_is_that_of_sglangs_kernel(size: int) -> None:
    assert cuda_digest.digest(pattern(size)) == GOLDEN[size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_the_digest_is_that_of_the_bytes_in_the_order_of_the_elements(dtype: torch.dtype) -> None:
    content = pattern(65538 // 8 * 8)
    tensor = content.view(dtype).reshape(-1, 4)
    assert cuda_digest.digest(tensor) == cuda_digest.digest(content) != cuda_digest.digest(tensor.t())
    assert cuda_digest.digest(tensor.t()) == cuda_digest.digest(tensor.t().contiguous())
    assert cuda_digest.digest(tensor[:1, :1]) == cuda_digest.digest(content[: dtype.itemsize])
    for at in (0, 40000, 65535):
        other = content.clone()
        other[at] ^= 1
        assert cuda_digest.digest(other) != cuda_digest.digest(content)


@pytest.mark.parametrize("ends", [(4, 32768, 40000), (40000, 65536, 65540), (3, 32768, 70001), (0, 0, 4)])
def test_the_digest_of_parts_is_that_of_the_whole(ends: tuple[int, ...]) -> None:
    whole = pattern(100_003)
    parts = [whole[start:end] for start, end in itertools.pairwise((0, *ends, len(whole)))]
    assert cuda_digest.digest(*parts) == cuda_digest.digest(whole) != cuda_digest.digest(*reversed(parts))
    assert checksums.sha256(*parts) == hashlib.sha256(whole.numpy().data).hexdigest()


def test_a_tensor_that_the_kernel_cannot_hash_is_never_asked_for() -> None:
    config = msgspec.structs.replace(tiny.config(), experts=256, expert_dim=2048, dim=7168)
    asked = opening.backend(config).digest
    whole = checksums.largest(config, checksums.ONE, "bfloat16")
    assert asked("cpu", whole) is not None and asked("cuda", whole) is None, "15 GB in one tensor"
    halved = checksums.Ranks(2)
    assert asked("cuda", checksums.largest(config, halved, "bfloat16")) is cuda_digest.digest
    assert asked("cuda", checksums.largest(config, halved, "float32")) is None
    assert asked("xpu", 1) is None
    assert "2 tensor-parallel ranks" in checksums.unknown(config, halved), "three heads"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tiny.config("bfloat16"), tmp_path_factory.mktemp("versions"), exact=False)


async def restarted(engine: OneServer, double: CudaDouble) -> Sample:
    """A turn during which the server ends and is started again."""
    await double.let_go(hold_at=1)
    work = asyncio.create_task(engine.sample(request()))
    await begun(engine)
    await double.die()
    await double.let_go()
    await double.start()
    return await work


def checked(engine: OneServer) -> tuple[bool, int]:
    stats = engine.stats()
    return bool(stats["checked"]), int(stats["unchecked"])


@pytest.mark.anyio
async def test_after_a_first_load_with_the_expected_checksums_every_difference_is_an_error(
    versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double = CudaDouble(versions.config)
    async with attached(versions, tmp_path, double=double) as (engine, _):
        assert checked(engine) == (True, 0)
        await versions.load(engine, 1)
        assert checked(engine) == (True, 0)
        double.spoilt = EXPERTS
        with pytest.raises(EngineError, match=f"1 of .* differ from the version's; {EXPERTS} has other bits"):
            await versions.load(engine, 2)
        assert engine.version == 1 and engine.stats()["reloads"] == 1 and not double.paused
        assert checked(engine) == (True, 0), "the version before was loaded again and compared"
        await versions.load(engine, 3)
        double.checker_fails = True
        with pytest.raises(EngineError, match="out of memory"):
            await versions.load(engine, 0)
    assert not caplog.records


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["layout", "checker"])
async def test_a_first_load_with_other_checksums_is_reported_and_the_server_is_not_compared(
    versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    double = CudaDouble(versions.config, swapped=fault == "layout")
    double.checker_fails = fault == "checker"
    async with attached(versions, tmp_path, double=double) as (engine, _):
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "first load (version 0)" in record.message
        why = f"2 of 21 tensors in the server differ from the version's; {EXPERTS} has other bits"
        assert (why if fault == "layout" else "out of memory") in record.message
        assert checked(engine) == (False, 1)
        await versions.load(engine, 1)
        assert engine.version == 1 and checked(engine) == (False, 1)
        assert len(double.bodies("/weights_checker")) == 1 and len(caplog.records) == 1, "decided once"
        assert {span.version for span in (await engine.sample(request())).spans} == {1}
        await restarted(engine, double)
        assert checked(engine) == (False, 1) and len(double.bodies("/weights_checker")) == 1, "the same settings"
        double.info["moe_runner_backend"] = "triton"
        double.swapped = double.checker_fails = False
        sample = await restarted(engine, double)
        assert checked(engine) == (True, 1) and {span.version for span in sample.spans} == {1}, "other settings"


@pytest.mark.anyio
async def test_a_server_that_has_the_version_by_its_own_words_is_loaded_before_it_is_given_up(
    versions: Versions, tmp_path: Path
) -> None:
    double = CudaDouble(versions.config)
    double.told = f"0-{versions.files[0][1][:16]}"  # as a client left it that ended during an update
    async with attached(versions, tmp_path, double=double) as (engine, _):
        assert len(double.bodies("/update_weights_from_disk")) == 1 and checked(engine) == (True, 0)
        second = sglang_engine(versions.config, tmp_path / "second", url=double.url, start_s=20.0)
        await second.attach()
        await versions.load(second, 0)
        assert len(double.bodies("/update_weights_from_disk")) == 1, "it holds the version, as its checksums show"
        assert checked(second) == (True, 0)
        double.spoilt = EXPERTS
        with pytest.raises(EngineError, match="has other bits"):
            await versions.load(second, 1)
        await second.stop()
