"""The parts of benchmarks/sglang_gpu.py, against the double: they measure what the figures' names say."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks import sglang_gpu
from benchmarks.conditions import Figures
from headrace.engines.sglang.engine import SglangEngine
from tests.support import tiny
from tests.support.engines import Versions
from tests.support.sglang.double import Double
from tests.support.sglang.requests import attached

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tiny.config(), tmp_path_factory.mktemp("versions"), exact=False)


@pytest.fixture
async def pair(versions: Versions, tmp_path: Path) -> AsyncIterator[tuple[SglangEngine, Double]]:
    async with attached(versions, tmp_path) as made:
        yield made


async def test_differences_are_those_to_the_weights_that_were_served(
    pair: tuple[SglangEngine, Double], versions: Versions
) -> None:
    figures: Figures = {}
    await sglang_gpu.speeds(pair[0], versions.models[0], [2], 4, 1, figures)
    assert 0 <= figures["b2_mean_abs_dlp"] <= figures["b2_max_abs_dlp"] < 1e-4 and figures["sglang_b2_tok_per_s"] > 0
    await sglang_gpu.speeds(pair[0], versions.models[1], [2], 4, 1, figures)
    assert figures["b2_mean_abs_dlp"] > 0.01, "the weights of another version"


async def test_turns_that_run_at_the_pause_are_counted(pair: tuple[SglangEngine, Double], versions: Versions) -> None:
    engine, double = pair
    await double.let_go(hold_at=3)
    figures: Figures = {}
    work = asyncio.create_task(sglang_gpu.swaps(engine, versions.config, versions.files, 9, 1, figures, ["abort"]))
    before = double.version
    await double.until(lambda: double.version != before)
    await double.let_go()
    await work
    assert figures["turns_across_swap_fewest"] == sglang_gpu.TURNS and figures["checked"]
    assert len(figures["pause_abort_ms"]) == 1 and figures["pause_abort_ms"][0] > 0
    assert engine.counts["taken_back"] == sglang_gpu.TURNS


async def test_turns_that_end_before_the_pause_are_not_counted(
    pair: tuple[SglangEngine, Double], versions: Versions
) -> None:
    figures: Figures = {}
    await sglang_gpu.swaps(pair[0], versions.config, versions.files, 1, 1, figures)
    assert figures["turns_across_swap_fewest"] == 0
