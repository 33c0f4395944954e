"""Users' names on the bus: a keyed hash, so that the clear name never leaves the gateway."""

import hashlib
import hmac

from headrace.gateway.http import HttpRefused


class UserKeys:
    """Hashes user names with the secret that all gateways of a broker share (`tenants.store`)."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secret
        """None until the operator has made it for this gateway's seed."""

    def hash(self, tenant: str, user: str) -> str:
        """20 hexadecimal digits of an HMAC-SHA256. UnicodeEncodeError for a name with lone surrogates; HttpRefused with
        503 without the secret."""
        if self.secret is None:
            raise HttpRefused(503, "this gateway's seed opens no key for users' names: run `headrace keys`", 5.0)
        return hmac.new(self.secret, f"{tenant}\0{user}".encode(), hashlib.sha256).hexdigest()[:20]
