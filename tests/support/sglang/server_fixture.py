"""The real server of a test module: SGLang in its own environment, on a tiny random Qwen3-MoE exported here."""

import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.server.engine import OneServer
from headrace.engines.server.process import Server
from headrace.rendering import schemas
from headrace.rendering.tokenizer import Tokenizer
from tests.support.engines import Versions
from tests.support.sglang.opening import sglang_engine

MAX_RUNNING = 8


def python() -> str:
    """The interpreter of the server's environment; the test is skipped, with the reason, where there is none."""
    interpreter = os.environ.get("HEADRACE_SGLANG", "")
    if not interpreter or not Path(interpreter).exists():
        pytest.skip("HEADRACE_SGLANG names no interpreter with SGLang; `make test-sglang` builds one")
    return os.path.abspath(interpreter)


ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.05", "--max-total-tokens", "65536"),
)
"""Arguments with which the server runs without a GPU (docs/engines.md)."""


def arguments() -> list[str]:
    """HEADRACE_SGLANG_ARGS where it is set (on a machine with a GPU), else `ARGUMENTS`."""
    return shlex.split(os.environ["HEADRACE_SGLANG_ARGS"]) if "HEADRACE_SGLANG_ARGS" in os.environ else [*ARGUMENTS]


def prepared(versions: Versions, folder: Path, more: Sequence[str] = (), **others: Any) -> OneServer:
    """An engine whose server is not started. more: of its arguments. others: of `OneServer`."""
    tokenizer = folder / "tokenizer.json"
    Tokenizer.train((), 256 + len(schemas.tags())).save(tokenizer)
    log = Path(os.environ.get("HEADRACE_SGLANG_LOG") or folder / "server.log")
    args = [*arguments(), "--context-length", "2048", "--max-running-requests", str(MAX_RUNNING), *more]
    server = Server(python(), log)
    return sglang_engine(
        versions.config, folder / "stage", server=server, args=args, tokenizer=tokenizer,
        max_batch=MAX_RUNNING, **others,
    )  # fmt: skip


@asynccontextmanager
async def real(versions: Versions, folder: Path, more: Sequence[str] = ()) -> AsyncIterator[OneServer]:
    """An engine with a server of its own that serves version 0. more: of its arguments."""
    engine = prepared(versions, folder, more)
    try:
        await versions.load(engine, 0)
        yield engine
    finally:
        await engine.stop()


def checked(engine: OneServer) -> bool:
    """Whether the last load compared checksums; on a GPU also whether the first one decided against it."""
    terms, stats = engine._life.terms, engine.stats()
    assert terms is not None
    return bool(stats["checked"]) or (terms.device != "cpu" and bool(stats["unchecked"] or terms.ep_size > 1))
