"""The clone backend while another process holds the cache: in a fresh clone a template takes minutes to build."""

import asyncio
import fcntl
from pathlib import Path
from typing import Any

import pytest

from headrace.vmhost.node import capacity, prewarming
from headrace.vmhost.qemu import backend
from headrace.vmhost.qemu.backend import CloneBackend
from tests.support.hosts import CACHE, environment

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


async def test_a_backend_that_waits_for_its_templates_parks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MEMORY_S", 0.0)
    monkeypatch.setattr(capacity, "SAMPLE_S", 0.01)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    Path(CACHE).mkdir(parents=True, exist_ok=True)
    with (Path(CACHE) / "lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        opening = asyncio.create_task(CloneBackend.open(environment(warm=1), lambda *_: None))
        # Long enough for the periodic check to run, and for its first attempt to fill the stock.
        done, _ = await asyncio.wait([opening], timeout=prewarming.FILL_BY_S + 0.2)
        assert not done
    opened = await opening
    await opened.filled()
    await opened.close()
    assert failures == []
