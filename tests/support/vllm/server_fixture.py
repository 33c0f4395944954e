"""The real vLLM server of a test module, in its own environment, on a tiny random model exported here."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.server.engine import OneServer
from headrace.engines.server.http import Wire
from headrace.engines.server.options import ServerOptions
from headrace.engines.server.process import Server
from headrace.engines.vllm.backend import Vllm
from headrace.policy.config import PolicyConfig
from tests.support.engines import Versions

ARGUMENTS = ("--enforce-eager", "--max-model-len", "2048")
MOST = 8


def python() -> str:
    """The interpreter of the server's environment; the test is skipped, with the reason, where there is none."""
    interpreter = os.environ.get("HEADRACE_VLLM", "")
    if not interpreter or not Path(interpreter).exists():
        pytest.skip("HEADRACE_VLLM names no interpreter with vLLM; `make test-vllm` builds one")
    return os.path.abspath(interpreter)


def vllm_engine(
    config: PolicyConfig, folder: Path, more: Sequence[str] = (), tokenizer: Path | None = None, **others: Any
) -> OneServer:
    """An engine whose server is not started. more: of its arguments. tokenizer: of the run.
    others: of `OneServer`."""
    options = ServerOptions(python=python(), args=(*ARGUMENTS, *more))
    log = Path(os.environ.get("HEADRACE_VLLM_LOG") or folder / "server.log")
    server = Server(options.python, log)
    backend = Vllm(config, options, Wire(server.url), MOST)
    return OneServer(
        config, folder / "stage", backend, server=server, tokenizer=tokenizer, max_batch=MOST, start_s=240.0, **others
    )


@asynccontextmanager
async def real(versions: Versions, folder: Path, tokenizer: Path | None = None) -> AsyncIterator[OneServer]:
    """An engine with a server of its own that serves version 0."""
    engine = vllm_engine(versions.config, folder, tokenizer=tokenizer)
    try:
        await versions.load(engine, 0)
        yield engine
    finally:
        await engine.stop()
