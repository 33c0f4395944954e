"""A tenant connects to a real broker with an API key, in a plain NATS client, and uses the gateway's routes there."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client

from headrace.actors.gateway import Gateway
from headrace.bus.broker import credentials
from headrace.bus.broker.server import CONF, Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, Unrecoverable
from headrace.bus.nats.streams import declare
from headrace.config import Config, Production, Run
from headrace.gateway.tenants import callout
from headrace.gateway.tenants.keys import ApiKeys, key_file
from tests.support.actors import living
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def gateway(server: Server, seeds: Path, folder: Path, run: str) -> AsyncIterator[ApiKeys]:
    """A gateway that opens the broker to tenants, and its keys."""
    config = Config(run=Run(dir=str(folder)), production=Production(training_allowed=True, broker_tenants=True))
    (folder / run).mkdir(parents=True)
    async with await Bus.connect(server.url, role="admin", credentials=seeds, timeout=PATIENCE_S) as admin:
        await declare(admin)
    async with await Bus.connect(server.url, role="gateway", credentials=seeds, timeout=PATIENCE_S) as bus:
        async with living(Gateway, config, bus, run):
            yield ApiKeys(key_file(config))


class Tenant:
    """A plain client with an API key; nothing of headrace is in it."""

    def __init__(self, server: Server, keys: ApiKeys, key: str, user: str = "") -> None:
        entry = keys.find(key)
        self.id = entry.id if entry is not None else "none"
        self._server, self._key, self._user = server, key, user
        self.closed = asyncio.Event()
        self.errors: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> "Tenant":
        """Connect. nats.errors.Error when the broker refuses."""

        async def failed(error: Exception) -> None:
            self.errors.put_nowait(str(error))

        async def closed() -> None:
            self.closed.set()

        self.client = Client()
        try:
            await self.client.connect(
                self._server.url,
                user=self._user,
                password=self._key,
                inbox_prefix=f"_INBOX.tenant.{self.id}".encode(),
                allow_reconnect=False,
                connect_timeout=int(PATIENCE_S),
                error_cb=failed,
                closed_cb=closed,
            )
        except BaseException:
            await self.client.close()  # nats-py leaves the socket of a refused connection open
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """Status and JSON of an answer."""
        payload = json.dumps(body).encode() if body is not None else b""
        subject = f"hr.tenant.{key or self.id}.{method}"
        answer = await self.client.request(subject, payload, timeout=PATIENCE_S, headers={"Path": path})
        assert answer.headers is not None
        return int(answer.headers["Hr-Status"]), json.loads(answer.data)

    async def denied(self, subject: str) -> None:
        """The broker refuses to take a message on a subject."""
        await self.client.publish(subject, b"{}")
        async with asyncio.timeout(PATIENCE_S):
            assert "permissions violation" in (await self.errors.get()).lower(), subject


async def test_a_key_opens_the_routes_of_its_tenant_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path / "broker", tenants=True) as server:
        async with gateway(server, server.credentials, tmp_path / "runs", "r1") as keys:
            secret = keys.add("acme", training=True)
            async with Tenant(server, keys, secret) as acme, Tenant(server, keys, keys.add("other")) as other:
                made = {"prompt": "go", "workspace": {"files": {"a.py": "x = 1\n"}}}
                status, agent = await acme.ask("post", "/v1/agents", made)
                assert status == 201 and agent["run"]["status"]
                path = f"/v1/agents/{agent['agent']['id']}"
                assert (await acme.ask("get", path))[0] == 200
                assert (await other.ask("get", path))[0] == 404, "another tenant's agent"
                assert (await other.ask("get", "/v1/agents?limit=5"))[1] == {"agents": []}
                for wrong in ("/v1/users/u", "/v1/sessions/s", "/v1/agents/../users/u", "/metrics", "v1/agents"):
                    assert (await acme.ask("delete", wrong))[0] == 400, wrong
                assert (await acme.ask("patch", "/v1/agents"))[0] == 405
                run = f"{path}/runs/{agent['run']['id']}"
                status, said = await acme.ask("get", f"{run}/stream")
                assert status == 400 and "over HTTP alone" in said["error"]
                for subject in (
                    f"hr.tenant.{other.id}.get",
                    "hr.feedback.acme.u1",
                    "hr.task.r1.production.t",
                    "$SYS.x",
                ):
                    await acme.denied(subject)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await acme.ask("get", path, key=other.id)
                await acme.client.subscribe("hr.tenant.>")
                await acme.client.subscribe(f"_INBOX.tenant.{other.id}.>")
                for _ in range(3):  # the request in the other's name, and two subscriptions
                    async with asyncio.timeout(PATIENCE_S):
                        assert "permissions violation" in (await acme.errors.get()).lower()
            monkeypatch.setattr(callout, "LIFE_S", 2.0)
            async with Tenant(server, keys, secret) as acme:
                keys.revoke(acme.id)
                assert (await acme.ask("get", "/v1/agents"))[0] == 401, "a revoked key is of no use at once"
                async with asyncio.timeout(PATIENCE_S):
                    await acme.closed.wait()
            for password in (secret, "wrong", ""):
                with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
                    async with Tenant(server, keys, password):
                        pass


@pytest.mark.slow
async def test_on_a_shared_broker_the_user_name_is_the_run(tmp_path: Path) -> None:
    seeds = tmp_path / "broker" / "credentials"
    credentials.open_to_tenants(seeds)
    credentials.write_accounts(seeds, ["r1", "r2"])
    (tmp_path / "broker" / "nats.conf").write_bytes(CONF.read_bytes())
    async with Server(tmp_path / "broker", prepared=True) as server:
        async with (
            gateway(server, seeds / "r1", tmp_path / "one", "r1") as one,
            gateway(server, seeds / "r2", tmp_path / "two", "r2") as two,
        ):
            first, second = one.add("acme"), two.add("acme")
            async with Tenant(server, one, first, "r1") as here, Tenant(server, two, second, "r2") as there:
                assert (await here.ask("get", "/v1/agents"))[0] == (await there.ask("get", "/v1/agents"))[0] == 200
            for key, run in ((first, "r2"), (first, "r3"), (second, "")):
                with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
                    async with Tenant(server, one, key, run):
                        pass


def test_keys_that_cannot_work_are_named(tmp_path: Path) -> None:
    credentials.open_to_tenants(tmp_path)
    with pytest.raises(ValueError, match="name the run differently"):
        credentials.write_accounts(tmp_path, ["callout"])
    (tmp_path / "issuer.nk").unlink()
    with pytest.raises(BusError, match="copy it from the broker's credentials"):
        credentials.issuer(tmp_path)


async def test_a_broker_that_was_not_prepared_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Unrecoverable, match="--tenants"):
        async with gateway(server, server.credentials, tmp_path / "runs", "r1"):
            pass
