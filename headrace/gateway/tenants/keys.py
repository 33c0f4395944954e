"""API keys as a gateway knows them: each belongs to a tenant, and only its hash is stored, in HR_KEYS.

All gateways of a broker follow the bucket, so a key that is made or revoked counts at each of them within milliseconds,
and a gateway needs no file of its own.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterable

from headrace.bus.connection import Bus
from headrace.bus.sealing import unsealed
from headrace.gateway.user_keys import UserKeys
from headrace.messages.base import Message
from headrace.messages.product import KEYS, USERS_SECRET, ApiKey, SealedSecret

BUCKET = "HR_KEYS"


class ApiKeys:
    """The keys of all tenants."""

    def __init__(self, entries: Iterable[ApiKey] = ()) -> None:
        self._keys = {entry.id: entry for entry in entries}

    def find(self, key: str) -> ApiKey | None:
        """The record of a key; None for a key that was never made or is revoked.

        The lookup is by hash, so its duration reveals nothing about existing keys.
        """
        digest = digest_of(key)
        entry = self._keys.get(digest[:8])
        return entry if entry is not None and entry.digest == digest else None

    def apply(self, name: str, entry: Message | None) -> None:
        """Take up a value of HR_KEYS, or its end."""
        if isinstance(entry, ApiKey) and name == KEYS + entry.id:
            self._keys[entry.id] = entry
        elif name.startswith(KEYS):
            self._keys.pop(name.removeprefix(KEYS), None)


class Following:
    """Keeps the keys and the secret of users' names as HR_KEYS has them."""

    def __init__(self, bus: Bus, keys: ApiKeys, users: UserKeys, event: Callable[..., Awaitable[None]]) -> None:
        """event: `Actor.event`."""
        self._bus, self._keys, self._users, self._event = bus, keys, users, event

    async def read(self) -> None:
        """Take up what is stored."""
        for name, (entry, _) in (await (await self._bus.kv(BUCKET)).items()).items():
            await self._apply(name, entry)

    async def follow(self) -> None:
        """Take up every change, until cancelled."""
        async for name, entry, _ in (await self._bus.kv(BUCKET)).watch():
            await self._apply(name, entry)

    async def _apply(self, name: str, entry: Message | None) -> None:
        self._keys.apply(name, entry)
        if name == USERS_SECRET and isinstance(entry, SealedSecret):
            secret = unsealed(self._bus, entry)
            if secret is None:
                text = "the key of users' names is sealed for other seeds than this gateway's: run `headrace keys`"
                await self._event("secret_sealed", text, "error")
            else:
                self._users.secret = secret


def digest_of(key: str) -> str:
    """SHA-256 of a key, hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
