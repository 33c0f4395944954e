"""The real server of a test module: SGLang in its own environment, on a tiny random Qwen3-MoE exported here."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.server import Server, arguments
from headrace.rendering import schemas
from headrace.rendering.tokenizer import Tokenizer
from tests.support.engines import Versions

MAX_RUNNING = 8


def python() -> str:
    """The interpreter of the server's environment; the test is skipped, with the reason, where there is none."""
    interpreter = os.environ.get("HEADRACE_SGLANG", "")
    if not interpreter or not Path(interpreter).exists():
        pytest.skip("HEADRACE_SGLANG names no interpreter with SGLang; `make test-sglang` builds one")
    return os.path.abspath(interpreter)


def prepared(versions: Versions, folder: Path, more: Sequence[str] = ()) -> tuple[Server, Path]:
    """A server that is not started, and the run's tokenizer.json. more: of its arguments."""
    tokenizer = folder / "tokenizer.json"
    Tokenizer.train((), 256 + len(schemas.tags())).save(tokenizer)
    args = [*arguments(), "--dtype", versions.config.dtype, "--context-length", "2048"]
    args += ["--max-running-requests", str(MAX_RUNNING), "--enable-return-routed-experts", *more]
    log = Path(os.environ.get("HEADRACE_SGLANG_LOG") or folder / "server.log")
    return Server(python(), args, log, sparse=True), tokenizer


@asynccontextmanager
async def real(versions: Versions, folder: Path, more: Sequence[str] = ()) -> AsyncIterator[SglangEngine]:
    """An engine with a server of its own that serves version 0 and could take differences. more: of its arguments."""
    server, tokenizer = prepared(versions, folder, more)
    engine = SglangEngine(versions.config, folder / "stage", server=server, tokenizer=tokenizer, max_batch=MAX_RUNNING)
    try:
        await versions.load(engine, 0)
        yield engine
    finally:
        await engine.stop()


def checked(engine: SglangEngine) -> bool:
    """Whether the last load compared checksums; on a GPU also whether the first one decided against it."""
    terms, stats = engine._life.terms, engine.stats()
    assert terms is not None
    return bool(stats["checked"]) or (terms.device != "cpu" and bool(stats["unchecked"] or terms.ep_size > 1))
