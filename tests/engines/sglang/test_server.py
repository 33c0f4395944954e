"""A server process of our own, played by the double: started on the staged version, killed, started again, gone."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.base import EngineError
from headrace.engines.server.backend import IncompatibleServer
from headrace.engines.server.engine import OneServer
from headrace.engines.server.process import Server
from headrace.engines.server.weights.lock import NotServed
from headrace.messages.rollout import Span
from tests.support import tiny
from tests.support.engines import Versions, request
from tests.support.paths import ROOT
from tests.support.sglang.opening import opened, sglang_engine
from tests.support.sglang.requests import begun

pytestmark = pytest.mark.anyio


def interpreter(folder: Path, command: str) -> str:
    """An executable that takes a Python's arguments and runs `command` with them."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {command} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.mark.slow
async def test_it_is_started_on_the_version_it_serves_and_again_when_it_was_killed(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path, exact=False)
    python = interpreter(tmp_path, f"{sys.executable} -m tests.support.sglang.double_process")
    server = Server(python, tmp_path / "logs" / "server.log")
    engine = sglang_engine(versions.config, tmp_path / "stage", server=server, args=("--device", "cpu"), start_s=60.0)
    await versions.load(engine, 0)
    assert engine.stats()["pause_ms"] == 0.0 and engine.stats()["checked"], "what it started on is what it serves"
    await versions.load(engine, 1)
    work = asyncio.create_task(engine.sample(request(ids=(1, 2), tokens=400)))
    await begun(engine)
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    sample = await work
    assert sample.spans == (Span(0, 401, 1),) and server.starts == 2 and engine.counts["lost"] == 1
    pid = server.process.pid
    await engine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    versions = Versions(tiny.config(), tmp_path, exact=False)
    python = interpreter(tmp_path, "sh -c 'echo ImportError: no such kernel >&2; exit 1'")
    server = Server(python, tmp_path / "server.log")
    engine = sglang_engine(versions.config, tmp_path / "stage", server=server, start_s=20.0)
    with pytest.raises(NotServed, match="ImportError: no such kernel"):
        await versions.load(engine, 0)
    assert engine.version == -1
    server.python = "/no/such/python"
    with pytest.raises(EngineError, match="cannot be run"):
        await versions.load(engine, 0)
    await engine.stop()


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    config = tiny.config()
    with pytest.raises(IncompatibleServer, match=r"engine\.exact: expected false"):
        opened(config, tmp_path, exact=True, url="http://x")
    cases: tuple[dict[str, Any], ...] = ({}, {"url": "http://x", "python": "p"})
    for options in cases:
        with pytest.raises(IncompatibleServer, match=r"either url"):
            opened(config, tmp_path, **options)
    made = opened(config, tmp_path, python="p", args=["--context-length", "9"])
    assert isinstance(made, OneServer) and made.version == -1
    command = made._backend.command(tmp_path, "0-a", 1)
    own = ["--dtype", "float32", "--max-running-requests", "64", "--enable-return-routed-experts"]
    assert [*command.arguments][-7:] == [*own, "--context-length", "9"]
