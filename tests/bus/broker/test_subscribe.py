"""Every role tries to subscribe to every family of subjects at a real broker, beside a foreign run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from headrace.bus.broker import credentials, permissions
from headrace.bus.broker.server import CONF, Server
from headrace.bus.connection import Bus
from headrace.bus.errors import Denied
from headrace.messages import subjects as s
from tests.conftest import CONNECT_S
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
ROLES = [*permissions.ACTORS, *permissions.READERS]
RUNS = ("r1", "r2")
NEVER = (">", "hr.>", "$KV.>", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$SYS.>", "_INBOX.>", "hr.rpc.>", "*.*.>")
"""Filters that no role but the admin may subscribe to."""


@pytest.fixture(scope="module")
async def shared(anyio_backend: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A broker with an account per run."""
    folder: Path = tmp_path_factory.mktemp("shared")
    credentials.write_accounts(folder / "credentials", RUNS)
    (folder / "nats.conf").write_bytes(CONF.read_bytes())
    async with Server(folder, prepared=True) as server:
        yield server


async def connect(server: Server, run: str, role: str) -> Bus:
    return await Bus.connect(server.url, role=role, credentials=server.credentials / run, timeout=CONNECT_S)


def filters(role: str) -> dict[str, bool]:
    """Every filter to try, and whether the table of subjects lets this role hear it."""
    tried = dict.fromkeys(NEVER, False)
    for subject in s.SUBJECTS.values():
        if subject in (s.RPC, s.RPC_NODE):
            for other in permissions.ROLES:
                tried[subject.where(service=other)] = other == role  # its own calls, `ping` among them
            continue
        core = subject is not s.ADVISORY and s.stream_of(subject.where()) is None
        listens = role in permissions.READERS
        # Records of a stream are read by consumers, whose creation is fenced by stream, and never from the wire.
        tried[subject.where()] = core and (role in subject.readers or listens)
        for run in RUNS:
            if "{run}" in subject.template:
                tried[subject.where(run=run)] = False
    for other in permissions.ROLES:
        tried[f"_INBOX.{other}.>"] = other == role
    return tried


def sendable(role: str) -> list[str]:
    """A subject of every filter that a role may publish on."""
    allowed = [each for each in permissions.of(role).publish if each.startswith("hr.")]
    return [".".join("x" if token in ("*", ">") else token for token in each.split(".")) for each in allowed]


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_hears_its_row_of_its_own_run_and_nothing_else(shared: Server, role: str) -> None:
    bus = await connect(shared, "r1", role)
    heard: dict[str, set[bytes]] = {}
    all_own = asyncio.Event()
    tried = filters(role)
    allowed = {filter for filter, may in tried.items() if may}
    awaited = {filter for filter in allowed if not filter.startswith(("_INBOX.", "hr.rpc."))}

    async def hear(message: Msg) -> None:
        heard.setdefault(message.subject, set()).add(message.data)
        if all(any(s.covers(filter, subject) for subject in heard) for filter in awaited):
            all_own.set()

    for filter, may in tried.items():
        if may:
            await bus.connection.subscribe(filter, hear)
        else:
            with pytest.raises(Denied) as denied:
                await bus.connection.subscribe(filter, hear)
            assert (denied.value.role, denied.value.action, denied.value.subject) == (role, "subscribe to", filter)
    assert len(allowed) >= 2 and len(tried) - len(allowed) > 30
    for run, text in (("r2", b"foreign"), ("r1", b"own")):
        for sender in ROLES:
            other = await connect(shared, run, sender)
            for subject in sendable(sender):
                await other.connection.client.publish(subject, text)
            await other.connection.flush()
            await other.close()
    if awaited:
        async with asyncio.timeout(PATIENCE_S):
            await all_own.wait()
    await bus.connection.flush()
    assert {data for texts in heard.values() for data in texts} <= {b"own"}
    assert all(any(s.covers(filter, subject) for filter in allowed) for subject in heard)
    await bus.close()
