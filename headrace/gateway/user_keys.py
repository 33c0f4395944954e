"""Users' names on the bus: a keyed hash, so that the clear name never leaves the gateway."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path


class UserKeys:
    """Hashes user names with a key that stays in a file of mode 0600."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        self._key = path.read_bytes()

    def hash(self, tenant: str, user: str) -> str:
        """20 hexadecimal digits of an HMAC-SHA256. UnicodeEncodeError for a name with lone surrogates."""
        return hmac.new(self._key, f"{tenant}\0{user}".encode(), hashlib.sha256).hexdigest()[:20]
