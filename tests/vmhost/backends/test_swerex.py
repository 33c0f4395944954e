"""The swerex backend where its server is missing, refuses, or dies (test_conformance.py tests its sandboxes)."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, ReadFile, SandboxLost
from headrace.vmhost.backends.swerex.backend import SwerexBackend
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host
from tests.support import swerex

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


def request(**changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "group": "g", "slot": 0, "attempt": 0}
    return Acquire(**(fields | {"isolation": "episode", "files": {"a.txt": b"one\n"}} | changes))


async def test_what_is_missing_is_named() -> None:
    for environment, why in (
        (Environment(backend="swerex"), r"expects the address .* in \[environment\] url"),
        (Environment(backend="swerex", url="http://127.0.0.1:9", key_file="/nowhere"), "/nowhere cannot be read"),
        (Environment(backend="swerex", url="http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be used"),
    ):
        with pytest.raises(VmhostError, match=why):
            await Host.open(environment)
    (need,) = SwerexBackend.requirements(Environment(backend="swerex"))
    assert (need.key, need.met) == ("url", False)


@pytest.mark.slow
async def test_a_wrong_token_is_refused_and_a_dead_server_loses_its_sandboxes(tmp_path: Path) -> None:
    with swerex.server(tmp_path) as server:
        environment = Environment(backend="swerex", url=server.url, warm=0, key_file=server.key_file)
        with pytest.raises(VmhostError, match="key_file names the file"):
            await Host.open(msgspec.structs.replace(environment, key_file=""))
        host = await Host.open(environment)
        try:
            one, two = [await host.acquire(request(slot=slot)) for slot in range(2)]
            large = bytes(range(256)) * (3 << 12)  # several chunks in both directions
            pushed = await host.acquire(request(slot=2, files={"large": large}))
            assert (await pushed.call(ReadFile(path="large", limit=len(large)))).data == large
            place = Path((await one.call(Exec(argv=("pwd",)))).stdout.strip())
            assert place.is_dir()
            host.release(one.id)
            while place.exists():
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(two.call(Exec(argv=("sleep", "600"), timeout_s=600.0)))
            await two.call(ReadFile(path="a.txt"))
            server.process.kill()
            with pytest.raises(SandboxLost, match="SWE-ReX server at"):
                await waiting
            with pytest.raises(SandboxLost, match="cannot be used"):
                await host.acquire(request(slot=3))
        finally:
            await host.close()
