"""The tenants that allow training on their users' sessions."""

from headrace.config import Config
from headrace.gateway.tenants.keys import ApiKeys, key_file


class Consent:
    """Reads the consent of tenants anew at every call, because a tenant may opt out after a session was rated."""

    def __init__(self, config: Config) -> None:
        self._production = config.production
        self._keys = ApiKeys(key_file(config))

    def tenants(self) -> frozenset[str]:
        """Tenants with a valid key that opts in, and the tenant of headrace's own sessions if [production] opts in."""
        allowed = {entry.tenant for entry in self._keys.entries() if entry.training}
        if self._production.training_allowed:
            allowed.add(self._production.tenant)
        return frozenset(allowed)
