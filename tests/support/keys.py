"""Keys for tests of signatures."""

from pathlib import Path

from headrace.bus import signatures
from headrace.bus.broker import keys
from headrace.bus.broker.keys import Key
from headrace.bus.connection import Bus
from headrace.weights.signing import Trust

PUBLISHER = Key(b"p" * 32)
STRANGER = Key(b"s" * 32)


def trust(**options: bool) -> Trust:
    """Trust in the publisher alone."""
    return Trust([PUBLISHER.public], **options)


def writes_for_others(bus: Bus, credentials: Path) -> None:
    """Sign each record of a connection with the seed of a role that may write it: the admin's permissions, and records
    that readers accept."""
    own = bus.key_of

    def key_of(subject: str, kind: str) -> Key | None:
        roles = signatures.writers(subject, kind)
        return keys.load(credentials, min(roles)) if roles else own(subject, kind)

    bus.key_of = key_of


async def as_writers(url: str, credentials: Path) -> Bus:
    """A connection with the admin's permissions whose records readers accept, as of `writes_for_others`."""
    bus = await Bus.connect(url, role="admin", credentials=credentials)
    writes_for_others(bus, credentials)
    return bus
