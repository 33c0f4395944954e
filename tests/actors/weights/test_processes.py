"""Sender and receiver as real processes that are killed with SIGKILL in the middle of a version."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from headrace.weights import report, snapshot
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.weight_runs import WeightRun, within
from tests.support.weights import model

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(connect: Connect, tmp_path: Path) -> AsyncIterator[WeightRun]:
    out = await WeightRun(connect, tmp_path).open()
    out.tensors = model(wide=150_000)
    yield out
    await out.close()


@asynccontextmanager
async def actors(run: WeightRun, server: Server) -> AsyncIterator[asyncio.subprocess.Process]:
    """`headrace actor weight_sender,weight_receiver` as an operator starts it."""
    config = run.folder / "config.toml"
    config.write_text(f'[run]\ndir = "{run.folder}"\n')
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "headrace.cli", "actor", "weight_sender,weight_receiver", "--config", str(config)),
        *("--run", run.id, "--url", server.url, "--credentials", str(server.credentials)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
        await child.wait()


async def first(run: WeightRun, subject: str) -> None:
    """Wait for the first message on a subject of HR_WEIGHTS."""
    async for _ in run.bus.follow("HR_WEIGHTS", subject):
        return


@pytest.mark.slow
async def test_kill_9_in_the_middle_of_a_version_shows_nothing_and_loses_nothing(
    run: WeightRun, server: Server
) -> None:
    async with actors(run, server) as child:
        await run.train(0)
        await within(PATIENCE_S, first(run, f"hr.weights.{run.id}.0.manifest"))
        child.kill()
        await child.wait()
    # On a starved machine the kill may come after the head; then the version is complete. It is never there in part.
    assert {head.state_hash for head in await run.heads()} <= {run.hashes[0]}
    node = run.trainer.node
    async with actors(run, server) as child:
        staged = await within(PATIENCE_S, run.staged(0, node=node))
        assert snapshot.file_hash(staged.path) == run.hashes[0]
        await run.train(1, density=0.3)
        await within(PATIENCE_S, first(run, f"hr.weights.{run.id}.1.>"))
        child.kill()
        await child.wait()
    async with actors(run, server) as child:
        staged = await within(PATIENCE_S, run.staged(1, node=node))
        assert snapshot.file_hash(staged.path) == run.hashes[1]
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
    assert [head.version for head in await run.heads()] == [0, 1]
    good, text = await report.verify(run.bus, run.id, fetch=run.fetch)
    assert good, text
    left = [file.name for file in (run.folder / run.id / "nodes").rglob(".*.part")]
    assert left == []
