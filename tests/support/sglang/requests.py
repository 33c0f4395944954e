"""A double, an engine attached to it, and its requests in flight: what the tests of the SGLang client share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.engines.server.engine import OneServer
from tests.support.engines import Versions
from tests.support.sglang.double import Double
from tests.support.sglang.opening import sglang_engine


async def begun(engine: OneServer, count: int = 1) -> None:
    """Until the engine has heard a token of so many requests in flight."""
    while sum(request.started for request in engine._in_flight.values()) < count:
        await asyncio.sleep(0.001)


@asynccontextmanager
async def attached(
    versions: Versions, folder: Path, *, running: int = 8, double: Double | None = None, **options: Any
) -> AsyncIterator[tuple[OneServer, Double]]:
    """An engine that has loaded version 0 into a double. double: one that has not started."""
    double = double or Double(versions.config, max_running=running)
    await double.start()
    engine = sglang_engine(versions.config, folder / "stage", url=double.url, start_s=20.0, **options)
    try:
        await engine.attach()
        await versions.load(engine, 0)
        yield engine, double
    finally:
        await double.let_go()
        await engine.stop()
        await double.close()
