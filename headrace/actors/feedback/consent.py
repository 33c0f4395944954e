"""The tenants that allow training on their users' sessions."""

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.gateway.tenants.keys import BUCKET
from headrace.messages.product import KEYS, ApiKey


class Consent:
    """Reads the consent of tenants anew at every call, because a tenant may opt out after a session was rated."""

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus, self._production = bus, config.production

    async def tenants(self) -> frozenset[str]:
        """Tenants with a valid key that opts in, and the tenant of headrace's own sessions if [production] opts in.
        BusError."""
        keys = (await (await self._bus.kv(BUCKET)).items(f"{KEYS}*")).values()
        allowed = {entry.tenant for entry, _ in keys if isinstance(entry, ApiKey) and entry.training}
        if self._production.training_allowed:
            allowed.add(self._production.tenant)
        return frozenset(allowed)
