"""Secrets that the holders of some roles' seeds can open: they are stored where other roles may read."""

from collections.abc import Iterable

from headrace.bus.broker.keys import sealed as box_for
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.signatures import FILE, Forged
from headrace.messages.product import SealedSecret


def recipients(bus: Bus, roles: Iterable[str]) -> set[str]:
    """The public keys of roles, as `FILE` beside the bus's credentials names them. BusError for a role without one."""
    found: set[str] = set()
    for role in roles:
        try:
            named = bus.trust.of_role(role)
        except Forged as error:
            raise BusError(str(error)) from None
        if not named:
            raise BusError(f"nothing can be sealed for the role {role}: {FILE} of the credentials here names none")
        found |= set(named)
    return found


def sealed(bus: Bus, secret: bytes, roles: Iterable[str]) -> SealedSecret:
    """A secret for the holders of the roles' seeds. BusError."""
    roles = tuple(roles)
    recipients(bus, roles)
    keys = {public: key for role in roles for public, key in bus.trust.of_role(role).items()}
    return SealedSecret(boxes={public: box_for(secret, key) for public, key in sorted(keys.items())})


def unsealed(bus: Bus, sealed: SealedSecret) -> bytes | None:
    """The secret; None where it is not sealed for the seed of this connection."""
    key = bus.key_of("", "")
    box = sealed.boxes.get(key.public) if key is not None else None
    return key.opened(box) if key is not None and box is not None else None
