"""The clone backend while another process holds the cache: in a fresh clone a template takes minutes to build."""

import asyncio
import fcntl
from pathlib import Path
from typing import Any

import pytest

from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base, packages
from headrace.vmhost.node import capacity
from headrace.vmhost.qemu import backend, probe, process
from headrace.vmhost.qemu.backend import CloneBackend
from headrace.vmhost.templates import template
from tests.support.hosts import CACHE, environment

pytestmark = [pytest.mark.anyio, pytest.mark.vm]


async def test_a_template_that_is_made_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unmade(*_: Any) -> None:
        raise VmhostError("not made in this test")

    monkeypatch.setattr(template, "build", unmade)
    opened = await CloneBackend.open(environment(warm=0), lambda *_: None)
    cache, version = Path(CACHE), process.version()
    folder = packages.folder(cache)
    accel, machine, _ = probe.choose(folder, cache, version)
    parts = base.Parts(cache, folder, version, accel, machine, print)
    wanted = "light?memory_mib=4096"
    try:
        with base.maker(cache, base.plan(environment(), wanted).folder(parts)):
            making = asyncio.create_task(opened.template(wanted))
            done, _ = await asyncio.wait([making], timeout=0.2)
            assert not done
            (await opened.machine("light", SandboxLimits())).kill()
            assert "light" in await asyncio.to_thread(base.ensure, environment())
            assert not making.done()
        with pytest.raises(VmhostError, match="not made"):
            await making
    finally:
        await opened.close()


async def test_a_backend_that_waits_for_its_templates_parks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "CALM_S", 0.0)
    monkeypatch.setattr(capacity, "SAMPLE_S", 0.01)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    Path(CACHE).mkdir(parents=True, exist_ok=True)
    with (Path(CACHE) / "lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        opening = asyncio.create_task(CloneBackend.open(environment(warm=1), lambda *_: None))
        # Long enough for the periodic check to run, and for its first attempt to fill the stock.
        done, _ = await asyncio.wait([opening], timeout=backend.FILL_BY_S + 0.2)
        assert not done
    opened = await opening
    await opened.filled()
    await opened.close()
    assert failures == []
