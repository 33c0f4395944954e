"""API keys of tests: made by an operator at the broker, or known to a listener without one."""

import asyncio
from typing import Any

from headrace.actors.gateway import Gateway
from headrace.bus.connection import Bus
from headrace.gateway.tenants.keys import ApiKeys, digest_of
from headrace.gateway.tenants.store import add
from headrace.messages.product import ApiKey


def entry(key: str, tenant: str = "acme", **fields: Any) -> ApiKey:
    """The record of a key."""
    digest = digest_of(key)
    return ApiKey(id=digest[:8], digest=digest, tenant=tenant, created=0.0, **fields)


class KnownKeys(ApiKeys):
    """Keys that no broker stores."""

    def add(self, tenant: str, **fields: Any) -> str:
        key = f"hr-{tenant}"
        self._keys[digest_of(key)[:8]] = entry(key, tenant, **fields)
        return key


async def made(operator: Bus, tenant: str, *gateways: Gateway, **options: Any) -> str:
    """A new key that these gateways know."""
    key = await add(operator, tenant, **options)
    for gateway in gateways:
        await known(gateway, key)
    return key


async def known(gateway: Gateway, key: str, *, so: bool = True) -> None:
    """Wait until a gateway knows a key, or, with `so` false, no longer."""
    while (gateway.api_keys.find(key) is not None) != so:
        await asyncio.sleep(0.01)
