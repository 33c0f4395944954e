"""Keys for tests of signatures, and a connection that writes in several roles.

`as_writers` writes as the admin with the signatures of the roles. `Writers` writes by a connection of each role, for
tests in which a browser has to hear the records live.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.bus import signatures
from headrace.bus.broker import keys
from headrace.bus.broker.keys import Key
from headrace.bus.broker.permissions import KV_WRITERS
from headrace.bus.connection import Bus
from headrace.bus.nats.kv import KeyValue
from headrace.messages.base import Message
from headrace.weights.signing import Trust

PUBLISHER = Key(b"p" * 32)
STRANGER = Key(b"s" * 32)


def trust(**options: bool) -> Trust:
    """Trust in the publisher alone."""
    return Trust([PUBLISHER.public], **options)


async def as_writers(url: str, credentials: Path | None, **options: Any) -> Bus:
    """A connection with the admin's permissions. Each record has the signature of a role that may write it, and
    heartbeats and figures come from that role's connection, because others do not hear the admin. options: as of
    `Bus.connect`."""
    bus = await Bus.connect(url, role="admin", credentials=credentials, **options)
    if credentials is None:
        return bus
    own, others, close = bus.key_of, Writers(url, credentials), bus.close

    def key_of(subject: str, kind: str) -> Key | None:
        roles = signatures.writers(subject, kind)
        return keys.load(credentials, min(roles)) if roles else own(subject, kind)

    async def close_all() -> None:
        await others.close()
        await close()

    bus.key_of, bus.emit, bus.close = key_of, others.emit, close_all  # type: ignore[method-assign]
    return bus


class Writers:
    """A connection of each role that writes, as far as it is needed: others hear their records live, too."""

    def __init__(self, url: str, credentials: Path) -> None:
        self._url, self._credentials = url, credentials
        self._open: dict[str, Bus] = {}
        self._stack = AsyncExitStack()

    async def of(self, role: str) -> Bus:
        """The connection of a role."""
        if role not in self._open:
            bus = await Bus.connect(self._url, role=role, credentials=self._credentials)
            self._open[role] = await self._stack.enter_async_context(bus)
        return self._open[role]

    async def publish(self, subject: str, message: Message) -> int:
        """Store a record as a role that may write it."""
        roles = signatures.writers(subject, message.type_name)
        return await (await self.of(min(roles) if roles else subject.split(".")[3])).publish(subject, message)

    async def emit(self, subject: str, message: Message) -> None:
        """Send a heartbeat or figures as the actor that they name, and traffic as a gateway."""
        kind, actor = subject.split(".")[1:3]
        await (await self.of("gateway" if kind == "traffic" else actor)).emit(subject, message)

    async def kv(self, bucket: str) -> KeyValue:
        """A bucket as its writer sees it."""
        return await (await self.of(KV_WRITERS[bucket])).kv(bucket)

    async def __aenter__(self) -> "Writers":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._stack.aclose()
