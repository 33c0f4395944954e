"""Access to the live page: its key, and signed tokens that expire and also show users' sessions.

Everything but the page's static files needs one of them. The secret of the tokens and the key exist only in the memory
of the process that serves the page, and in a file of mode 0600 that it writes, so both end with that process.
"""

import hashlib
import hmac
import time
from collections.abc import Callable
from secrets import token_bytes, token_urlsafe
from typing import Literal

Scope = Literal["", "run", "users"]
"""The records that a request may read: none; the run's without users'; all."""


class Access:
    """The key and the tokens of one process."""

    def __init__(self, clock: Callable[[], float] = time.time, secret: str = "") -> None:
        """secret: of another process's tokens, hexadecimal; empty: a new one."""
        self.secret, self._clock = secret or token_bytes(32).hex(), clock
        self.key = token_urlsafe(32)
        """Gives access to the run without users' records."""

    def token(self, seconds: float) -> str:
        """A token that gives access to users' sessions too for this many seconds."""
        until = str(int(self._clock() + seconds))
        return f"{until}.{self._sign(until)}"

    def scope(self, header: str) -> Scope:
        """The records that a request with this Authorization header may read."""
        scheme, _, token = header.partition(" ")
        if scheme != "Bearer":
            return ""
        if hmac.compare_digest(token.encode("utf-8", "replace"), self.key.encode()):
            return "run"
        until, _, signature = token.partition(".")
        if not until.isascii() or not until.isdecimal():
            return ""
        signed = hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(until).encode())
        return "users" if signed and self._clock() < int(until) else ""

    def _sign(self, until: str) -> str:
        return hmac.new(self.secret.encode(), until.encode(), hashlib.sha256).hexdigest()
