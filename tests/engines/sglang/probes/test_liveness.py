"""A server that accepts requests and answers none: it is found in seconds, ended and started again."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from headrace.engines.base import EngineError
from headrace.engines.server import engine as one_server
from headrace.engines.server import liveness
from headrace.engines.server.engine import OneServer
from headrace.engines.server.process import Server
from headrace.messages.rollout import Span
from tests.engines.sglang.test_server import interpreter
from tests.support import tiny
from tests.support.engines import Versions, request
from tests.support.patience import PATIENCE_S
from tests.support.sglang.opening import sglang_engine
from tests.support.sglang.requests import attached, begun

pytestmark = pytest.mark.anyio

EVERYTHING = {"/generate", "/v1/loads", "/ping", "/model_info", "/server_info", "/openapi.json", "/abort_request"}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tiny.config(), tmp_path_factory.mktemp("versions"), exact=False)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOADS_S", 0.5)
    monkeypatch.setattr(liveness, "PING_S", 0.5)


async def hung(engine: OneServer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not engine.counts["hung"]:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_server_process_that_stands_still_is_ended_and_started_again(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each turn waited for its whole deadline and failed, and nobody ended the server."""
    monkeypatch.setattr(liveness, "LOADS_S", 5.0)
    monkeypatch.setattr(liveness, "PING_S", 5.0)
    python = interpreter(tmp_path, f"{sys.executable} -m tests.support.sglang.double_process")
    server = Server(python, tmp_path / "server.log")
    engine = sglang_engine(
        versions.config, tmp_path / "stage", server=server, args=("--device", "cpu"), start_s=60.0, deadline_s=120.0
    )
    await versions.load(engine, 1)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2), tokens=400)))
    await begun(engine)
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGSTOP)
    sample = await work
    assert sample.spans == (Span(0, 401, 1),) and sample.stop == "length"
    assert server.starts == 2 and (engine.counts["hung"], engine.counts["lost"]) == (1, 1)
    # A server that stands still between turns is found by the next change of its weights.
    monkeypatch.setattr(one_server, "GRACE_S", 0.5)
    assert server.process is not None
    process = server.process
    os.killpg(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="did not answer within 30 s"):
        await versions.load(engine, 2)
    assert await process.wait() == -signal.SIGKILL
    await versions.load(engine, 2)
    assert {span.version for span in (await engine.sample(request())).spans} == {2} and server.starts == 3
    await engine.stop()


@pytest.mark.parametrize(
    ("silent", "patience_s"), [(EVERYTHING, 300.0), ({"/v1/loads", "/generate"}, 1.0)], ids=["all", "scheduler"]
)
async def test_turns_of_a_running_server_that_hangs_go_on_when_it_answers_again(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: set[str], patience_s: float
) -> None:
    monkeypatch.setattr(liveness, "HUNG_S", patience_s)
    async with attached(versions, tmp_path) as (engine, double):
        await double.let_go(hold_at=3)
        works = [asyncio.create_task(engine.sample(request(f"s{index}", ids=(1, 2, index)))) for index in range(2)]
        await begun(engine, 2)
        double.silent = silent
        await hung(engine)
        double.silent = set()
        await double.let_go()
        samples = await asyncio.gather(*works)
        assert all(len(sample.ids) == 8 and sample.spans == (Span(0, 10, 0),) for sample in samples)
        assert (engine.counts["hung"], engine.counts["lost"]) == (1, 2)


async def test_a_busy_scheduler_is_not_a_server_that_hangs(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path) as (engine, double):
        await double.let_go(hold_at=3)
        work = asyncio.create_task(engine.sample(request()))
        await begun(engine)
        double.silent = {"/v1/loads"}
        async with asyncio.timeout(PATIENCE_S):
            while [path for path, _ in double.seen].count("/ping") < 3:
                await asyncio.sleep(0.01)
        double.silent = set()
        await double.let_go()
        assert len((await work).ids) == 8 and not engine.counts["hung"] and not engine.counts["lost"]


async def test_a_turn_that_cannot_be_aborted_at_its_deadline_has_its_server_probed(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_server, "GRACE_S", 0.3)
    async with attached(versions, tmp_path, deadline_s=0.3) as (engine, double):
        for silent, count in ({"/abort_request"}, 0), ({"/abort_request", "/v1/loads"}, 1):
            await double.let_go(hold_at=3)
            double.silent = silent
            with pytest.raises(EngineError, match="could not be aborted"):
                await engine.sample(request())
            assert engine.counts["hung"] == count
        double.silent = set()
        await double.let_go()
        assert len((await engine.sample(request(tokens=2))).ids) == 2
