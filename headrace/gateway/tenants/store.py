"""Writes of the operator to HR_KEYS: API keys, and the sealed secrets of gateways and purges.

Every key has an entry of its own and every change is a compare-and-set, so operators on several machines lose none.
"""

import os
import secrets
import time
from collections.abc import Sequence

from headrace.bus.connection import Bus
from headrace.bus.errors import WrongSequence
from headrace.bus.sealing import recipients, sealed, unsealed
from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.gateway.tenants.keys import BUCKET, digest_of
from headrace.messages.product import KEYS, SECRETS, USUAL, ApiKey, Scope, SealedSecret

PREFIX = "hr-"
LONGEST = 128
"""Characters of a tenant's name."""
TRIES = 5
"""Attempts at a write while others write too."""


class KeysRefused(HeadraceError, exit_status=WRONG_INPUT):
    """Keys cannot be made, listed or ended as asked; the text says why."""


async def make_secrets(bus: Bus) -> None:
    """Make the secrets that are missing, and seal those that are there for seeds that were added since. KeysRefused,
    BusError."""
    state = await bus.kv(BUCKET)
    for name, role in SECRETS.items():
        roles = (role, "operator")
        for _ in range(TRIES):
            stored = await state.get(name)
            try:
                if stored is None:
                    await state.create(name, sealed(bus, os.urandom(32), roles))
                elif isinstance(stored[0], SealedSecret) and not recipients(bus, roles) <= set(stored[0].boxes):
                    await state.update(name, sealed(bus, await secret(bus, name), roles), stored[1])
                break
            except WrongSequence:  # another operator was first, or the value cannot be read
                continue
        else:
            raise KeysRefused(f"{name} of {BUCKET} cannot be read, and it is not replaced: users' hashes hang on it")


async def secret(bus: Bus, name: str) -> bytes:
    """A secret, for a role that may open it. KeysRefused."""
    stored = await (await bus.kv(BUCKET)).get(name)
    if stored is None or not isinstance(stored[0], SealedSecret):
        raise KeysRefused(f"this broker has no {name}: run `headrace keys` with the operator's seed once")
    opened = unsealed(bus, stored[0])
    if opened is None:
        raise KeysRefused(f"{name} is not sealed for the seed of {bus.role} here: run `headrace keys`")
    return opened


async def add(
    bus: Bus,
    tenant: str,
    *,
    training: bool = False,
    requests_per_minute: int = 600,
    tokens_per_minute: int = 0,
    scopes: Sequence[Scope] = USUAL,
) -> str:
    """Make a key for a tenant and return it. Only its hash is stored, so it cannot be shown again. KeysRefused,
    BusError."""
    if not tenant.strip() or len(tenant) > LONGEST or tenant != tenant.strip() or not tenant.isprintable():
        raise KeysRefused(f"expected a tenant's name of 1 to {LONGEST} printable characters, got {tenant[:40]!a}")
    await make_secrets(bus)
    state = await bus.kv(BUCKET)
    for _ in range(TRIES):
        key = PREFIX + secrets.token_urlsafe(32)
        digest = digest_of(key)
        entry = ApiKey(
            id=digest[:8],
            digest=digest,
            tenant=tenant,
            training=training,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            scopes=tuple(scopes),
            created=time.time(),
        )
        try:
            await state.create(KEYS + entry.id, entry)
            return key
        except WrongSequence:  # another key has this id
            continue
    raise KeysRefused("no free id was found in five attempts: try again")


async def entries(bus: Bus) -> list[ApiKey]:
    """All keys, oldest first. KeysRefused for one that cannot be read."""
    stored = [entry for entry, _ in (await (await bus.kv(BUCKET)).items(f"{KEYS}*")).values()]
    for skipped in bus.skipped.values():
        if skipped.subject.startswith(f"$KV.{BUCKET}.{KEYS}") and not skipped.forged:
            id = skipped.subject.rpartition(".")[2]
            raise KeysRefused(f"the record of key {id} cannot be read ({skipped.reason}): end it with --revoke {id}")
    return sorted((entry for entry in stored if isinstance(entry, ApiKey)), key=lambda entry: entry.created)


async def revoke(bus: Bus, id: str) -> None:
    """End a key, also one whose record cannot be read. KeysRefused when there is none."""
    if len(id) != 8 or not set(id) <= set("0123456789abcdef"):
        raise KeysRefused(f"expected the id of a key, eight digits of 0-9 and a-f, got {id[:40]!a}")
    state, name = await bus.kv(BUCKET), KEYS + id
    stored = await state.get(name)
    damaged = any(each.subject.endswith(name) for each in bus.skipped.values())
    if stored is None and not damaged:
        raise KeysRefused(f"there is no key {id}; `headrace keys` shows those that exist")
    await state.delete(name, stored[1] if stored is not None else None)
