"""`[production] broker_tenants`: the auth service for tenants' connections, and the answers to their requests."""

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.gateway.http import Listener
from headrace.gateway.tenants.callout import Callout, Event
from headrace.gateway.tenants.keys import ApiKeys
from headrace.gateway.tenants.requests import TenantRequests


class Access:
    """Access of tenants to the broker."""

    def __init__(self, callout: Callout, requests: TenantRequests) -> None:
        self._callout, self._requests = callout, requests

    async def stop(self) -> None:
        """End both, also where they were not started."""
        await self._callout.stop()
        await self._requests.stop()


async def open_access(bus: Bus, config: Config, keys: ApiKeys, listener: Listener, event: Event) -> Access:
    """Start both if the configuration says so. Unrecoverable when the broker was not prepared for tenants."""
    callout, requests = Callout(keys, event), TenantRequests(bus, keys)
    if config.production.broker_tenants:
        await callout.start(bus.connection.url, bus.credentials)
        await requests.start(listener)
    return Access(callout, requests)
