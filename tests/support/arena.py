"""A broker with something to lose in every stream, and attackers that hold the seed of one role each.

An attacker sends raw messages, many at a time. Afterwards everything that was stored or heard anywhere is compared with
the attacker's row: a record, a call or an answer outside of it is a breach, and so is a change of what lay there
before.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from nats.aio.msg import Msg

from headrace.bus.broker import callers, keys, permissions
from headrace.bus.broker.permissions import NAMES, ROLES
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.client import NatsClient
from headrace.bus.nats.streams import declare
from headrace.messages import subjects as s
from tests.support.patience import PATIENCE_S

CANARY = "canary"
FLEETING = ("HR_ADVISORY", "KV_HR_PRESENCE")
"""Streams without a first record of ours: it lapses, or the broker alone writes there."""
OURS = [stream for stream in NAMES if stream != "HR_ADVISORY"]
"""Streams into which the admin may write."""
MARK = "mark"
AT_ONCE = 1000
"""Messages between two waits: the broker drops requests beyond 10,000."""
USUAL = [role for role in ROLES if role not in ("admin", permissions.WEB_ROLE)]


class Sent(NamedTuple):
    """A message of an attacker."""

    subject: str
    reply: str = ""
    payload: bytes = b"forged"
    headers: Mapping[str, str] | None = None


def captured(stream: str, word: str = CANARY) -> str:
    """A subject that a stream captures, which no attack uses."""
    return permissions.captured(stream)[0].replace(">", ".".join([word] * 4))


def concrete(filter: str) -> str:
    """A subject that a filter matches."""
    return filter.replace("*", "x").replace(">", "x.x")


def row(role: str, subject: str) -> bool:
    """Whether a role may bring something about on a subject."""
    return any(s.covers(allowed, subject) for allowed in permissions.of(role).publish)


def places() -> list[str]:
    """Every subject that is worth an attack: those of every role's row, of every stream and call of the broker, and
    what belongs to others."""
    out: list[str] = []
    for role in USUAL:
        out += [concrete(allowed) for allowed in permissions.of(role).publish if not allowed.startswith("$JS.API")]
        out += [f"_INBOX.{role}.x.1", f"hr.rpc.{role}.operator.x.ping"]
    for service, methods in callers.CALLERS.items():
        out += [f"hr.rpc.{service}.{role}.x.{method}" for method in methods for role in ("judge", "gateway", "search")]
    for stream in NAMES:
        out += [*map(concrete, permissions.captured(stream)), f"$JS.ACK.{stream}.{CANARY}.1.1.1.1.0"]
        out += [f"$JS.API.{verb}" for verb in requests(stream)]
        out += [f"$JS.FC.{stream}.{CANARY}.x", f"hr.copy.{stream}.x", f"$JS.SNAPSHOT.ACK.{stream}.x"]
    out += ["$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.CONNZ", "hr.mirror.x", "_R_.000000.000000", "hr.new.x"]
    out += ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.HR_TASK.x", "$JS.API.STREAM.CREATE.NEW", "$JS.API.STREAM.NAMES"]
    return list(dict.fromkeys(out))


def requests(stream: str) -> list[str]:
    """Requests to the broker about a stream."""
    verbs = ("INFO", "CREATE", "UPDATE", "DELETE", "PURGE", "SNAPSHOT", "RESTORE", "MSG.GET", "MSG.DELETE")
    out = [f"STREAM.{verb}.{stream}" for verb in verbs]
    out += [f"CONSUMER.{verb}.{stream}.{CANARY}" for verb in ("CREATE", "DELETE", "INFO", "MSG.NEXT", "PAUSE", "RESET")]
    return [*out, f"CONSUMER.NAMES.{stream}", f"DIRECT.GET.{stream}", f"STREAM.LEADER.STEPDOWN.{stream}"]


async def flush(client: NatsClient) -> None:
    """Return when all that was sent has reached the broker. nats-py alone writes its PING before waiting commands."""
    await client.write_pending()
    await client.flush(timeout=60)


class Arena:
    """A running broker, a record and a durable consumer in every stream, and a listener in every role."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.heard: list[tuple[str, str]] = []
        """Role that heard, and the subject that it heard."""
        self._clients: list[NatsClient] = []
        self._config: dict[str, Any] = {}
        self._seen: dict[str, int] = {}
        self._canaries: dict[str, Any] = {}

    async def start(self) -> None:
        """Declare, store the canaries, and listen."""
        self.admin = await Bus.connect(self.server.url, role="admin", credentials=self.server.credentials)
        await declare(self.admin)
        for stream in NAMES:
            if stream in OURS:
                await self.admin.connection.call(captured(stream), b"canary", timeout=PATIENCE_S)
            config = {"name": CANARY, "durable_name": CANARY, "ack_policy": "explicit", "ack_wait": 3600 * 10**9}
            request = {"stream_name": stream, "config": config}
            await self.admin.connection.api(f"CONSUMER.CREATE.{stream}.{CANARY}", request, timeout=PATIENCE_S)
            if stream not in FLEETING:
                pulled = asyncio.Queue[Msg]()
                inbox = self.admin.connection.inbox()
                await self.admin.connection.subscribe(inbox, pulled.put)
                ask = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{CANARY}"
                await self.admin.connection.publish_request(ask, b"", inbox)
                async with asyncio.timeout(PATIENCE_S):
                    assert (await pulled.get()).data == b"canary"
        for role in USUAL:
            client = await self.client(role)

            async def hear(message: Msg, role: str = role, client: NatsClient = client) -> None:
                self.heard.append((role, message.subject))
                if message.subject.startswith("hr.rpc.") and message.reply:
                    await client.publish(message.reply, message.data)  # as a service that answers what it was asked

            for filter in permissions.of(role).subscribe:
                await client.subscribe(filter, cb=hear, pending_bytes_limit=0, pending_msgs_limit=0)
            await flush(client)
        self._config, self._canaries, self._seen = await self._state()

    async def client(self, role: str) -> NatsClient:
        """A plain client with a role's seed."""
        key = keys.load(self.server.credentials, role)
        client = NatsClient()
        assert key is not None
        client.set_public_key(key.public)

        async def refused(error: Exception) -> None:
            pass

        prefix = f"_INBOX.{role}".encode()
        await client.connect(
            self.server.url, signature_cb=key.sign, error_cb=refused, inbox_prefix=prefix, pending_size=64 << 20
        )
        self._clients.append(client)
        return client

    async def _state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
        infos = {}
        for stream in NAMES:
            infos[stream] = msgspec.json.decode(await self.admin.connection.api(f"STREAM.INFO.{stream}", timeout=60.0))
        consumers = {}
        for stream in NAMES:
            name = f"CONSUMER.INFO.{stream}.{CANARY}"
            told = msgspec.json.decode(await self.admin.connection.api(name, timeout=PATIENCE_S))
            consumers[stream] = (told["config"], told["delivered"]["consumer_seq"], told["num_ack_pending"])
        configs = {name: info["config"] for name, info in infos.items()}
        return configs, consumers, {name: info["state"]["last_seq"] for name, info in infos.items()}

    async def attack(self, role: str, messages: Iterable[Sent], *, as_if: str = "") -> tuple[int, list[str]]:
        """Send as a role. The number of messages, and the breaches of the row of `as_if`, by default the role's."""
        client, count = await self.client(role), 0
        row_of = as_if or role
        batch: list[Sent] = []
        for message in messages:
            batch.append(message)
            count += 1
            if len(batch) == AT_ONCE:
                await self._send(client, batch)
                batch.clear()
        await self._send(client, batch)
        for listener in self._clients:
            await flush(listener)  # what was sent to it has arrived
        breaches = await self._breaches(row_of)
        await client.close()
        self._clients.remove(client)
        return count, breaches

    async def _send(self, client: NatsClient, batch: list[Sent]) -> None:
        for one in batch:
            await client.publish(one.subject, one.payload, one.reply, dict(one.headers) if one.headers else None)
        await flush(client)
        for _ in range(3):  # what was asked before is done: the broker's workers take requests in their order
            await self.admin.connection.api("STREAM.INFO.HR_STEP", timeout=PATIENCE_S)
            await self.admin.connection.api(f"CONSUMER.INFO.HR_STEP.{CANARY}", timeout=PATIENCE_S)
        for stream in OURS:  # each stream stores in its own order: after the mark lies all that was sent before it
            await self.admin.connection.call(captured(stream, MARK), b"mark", timeout=PATIENCE_S)
        await flush(client)

    async def _breaches(self, role: str) -> list[str]:
        """Records, calls and changes outside of the role's row. The next attack is compared with the state after it."""
        configs, canaries, last = await self._state()
        out = [f"{name}: configuration" for name in NAMES if configs[name] != self._config[name]]
        out += [f"{name}: consumer" for name in NAMES if canaries[name] != self._canaries[name]]
        for stream in NAMES:
            if stream not in FLEETING:
                first = await self.admin.connection.api(f"STREAM.MSG.GET.{stream}", {"seq": 1}, timeout=PATIENCE_S)
                out += [] if b"Y2FuYXJ5" in first else [f"{stream}: the first record"]
            for subject in await self._new(stream, last[stream]):
                marked = stream in OURS and subject == captured(stream, MARK)
                out += [] if marked or row(role, subject) else [f"{stream}: {subject}"]
        self._seen, self._config, self._canaries = last, configs, canaries
        out += [f"{other} heard {subject}" for other, subject in self.heard if not self._may_hear(role, other, subject)]
        self.heard.clear()
        return list(dict.fromkeys(out))

    async def _new(self, stream: str, last: int) -> list[str]:
        """Subjects of the records after those that were seen."""
        first = self._seen[stream] + 1
        if last < first:
            return []
        if stream != "HR_TASK":
            return [record.subject async for record in self.admin.records(stream, start=first)]
        gets = (self.admin.get(stream, seq) for seq in range(first, last + 1))  # a work queue has one consumer
        got = await asyncio.gather(*gets, return_exceptions=True)
        return [record.subject for record in got if not isinstance(record, BaseException)]

    @staticmethod
    def _may_hear(role: str, other: str, subject: str) -> bool:
        return role == other or row(role, subject)  # who speaks with itself is no breach

    async def stop(self) -> None:
        """Hang up."""
        for client in self._clients:
            await client.close()
        await self.admin.close()


@asynccontextmanager
async def arena(folder: Path) -> AsyncIterator[Arena]:
    """An arena on a broker of its own."""
    async with Server(folder) as server:
        made = Arena(server)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


def consumer(stream: str, name: str, deliver: str, **more: Any) -> Sent:
    """A request for a consumer that delivers to a subject."""
    config = {
        "name": name,
        "ack_policy": "none",
        "deliver_policy": "last",
        "deliver_subject": deliver,
        "mem_storage": True,
    }
    config |= {"inactive_threshold": 10**9} | more
    request = msgspec.json.encode({"stream_name": stream, "config": config})
    return Sent(f"$JS.API.CONSUMER.CREATE.{stream}.{name}", payload=request)
