"""`python -m benchmarks.bus` measures, exits 0 and leaves no process, also when one of its processes is killed."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex

import pytest

from tests.support.marks import marked
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SMALL = ("--rounds", "1", "--calls", "200", "--singles", "3", "--trajectories", "8", "--blob-mib", "2", "--ray", "none")


@asynccontextmanager
async def measuring() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The benchmark, and the mark of its processes; all that it left is killed at the end."""
    mark = f"HR_BENCHMARK={token_hex(8)}"
    name, _, value = mark.partition("=")
    pipe = asyncio.subprocess.PIPE
    argv = (sys.executable, "-m", "benchmarks.bus", *SMALL)
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT, env=os.environ | {name: value}
    )
    try:
        yield process, mark
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        await process.wait()


async def test_it_measures_and_leaves_nothing() -> None:
    async with measuring() as (process, mark), asyncio.timeout(PATIENCE_S):
        out, _ = await process.communicate()
        assert (process.returncode, marked(mark)) == (0, {})
    figures = json.loads(out)
    assert (figures["kill_lost"], figures["kill_twice"]) == (0, 0)
    assert min(figures[name] for name in ("call_p50_ms", "published_per_s", "broker_flow_mb_per_s")) > 0.0


@pytest.mark.parametrize("victim", ["sink", "itself"])
async def test_nothing_is_left_when_one_of_its_processes_is_killed(victim: str) -> None:
    async with measuring() as (process, mark), asyncio.timeout(PATIENCE_S):
        while len(sinks := [pid for pid, line in marked(mark).items() if line.endswith(" sink sink ")]) < 4:
            await asyncio.sleep(0.05)
        os.kill(process.pid if victim == "itself" else sinks[0], signal.SIGKILL)
        assert await process.wait() != 0
        while marked(mark):
            await asyncio.sleep(0.05)
