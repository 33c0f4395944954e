"""Programs that a sandbox of the process backend leaves end with it, also if one of them has killed the agent.

The backend isolates nothing, so these are programs that stay among their own processes."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, SandboxLost
from headrace.vmhost import cgroups
from headrace.vmhost.node.host import Host
from tests.support.pids import running

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(cgroups.places() is None, reason="without control groups the agents alone end them"),
]
LEAVES = {
    "another session": "setsid sleep {0} > /dev/null 2>&1 & sleep 0.2",
    "an orphan": "(setsid sh -c 'sleep {0} & sleep {0}' > /dev/null 2>&1 &); sleep 0.2",
    "one that ignores signals": "(trap '' TERM HUP INT; nohup setsid sleep {0} > /dev/null 2>&1 &); sleep 0.2",
    "an orphan, and the agent killed": "setsid sleep {0} > /dev/null 2>&1 & sleep 0.2; kill -9 $PPID",
    "one that holds the folder, and the agent killed": "setsid sleep {0} > kept 2>&1 & sleep 0.2; kill -9 $PPID",
}


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", warm=0))
    yield opened
    await opened.close()


@pytest.mark.parametrize("way", LEAVES)
async def test_nothing_of_it_outlives_its_release(host: Host, way: str) -> None:
    seconds = f"80000.{os.getpid()}{list(LEAVES).index(way)}"
    files = {"secret": b"hidden tests"}
    judged = Acquire(
        run="r", lane="train", role="judge", group="g", slot=0, attempt=0, isolation="episode", files=files
    )
    sandbox = await host.acquire(judged)
    folder = (await sandbox.call(Exec(argv=("pwd",)))).stdout.strip()
    assert Path(folder, "secret").exists()
    try:
        await sandbox.call(Exec(argv=("sh", "-c", LEAVES[way].format(seconds))))
    except SandboxLost:
        assert "agent killed" in way
    assert running(seconds) or "agent killed" in way
    host.release(sandbox.id)
    await host.settle()
    async with asyncio.timeout(20):
        while running(seconds) or Path(folder).exists():
            await asyncio.sleep(0.01)
