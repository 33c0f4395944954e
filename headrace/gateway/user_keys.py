"""Users' names on the bus: a keyed hash, so that the clear name never leaves the gateway."""

import hashlib
import hmac
import secrets
from pathlib import Path

from headrace.secret_files import read_or_make


class UserKeys:
    """Hashes user names with a key that stays in a file of mode 0600."""

    def __init__(self, path: Path) -> None:
        self._key = read_or_make(path, secrets.token_bytes(32))

    def hash(self, tenant: str, user: str) -> str:
        """20 hexadecimal digits of an HMAC-SHA256. UnicodeEncodeError for a name with lone surrogates."""
        return hmac.new(self._key, f"{tenant}\0{user}".encode(), hashlib.sha256).hexdigest()[:20]
