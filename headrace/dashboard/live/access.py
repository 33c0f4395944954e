"""Access to users' sessions on the live page: a signed token that expires.

Without one the page shows no record that belongs to a user. The secret exists only in the memory of the process that
serves the page, so a token expires at the latest when that process ends.
"""

import hashlib
import hmac
import time
from collections.abc import Callable
from secrets import token_bytes


class Access:
    """Makes and checks tokens of one process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret, self._clock = token_bytes(32), clock

    def token(self, seconds: float) -> str:
        """A token that gives access to users' sessions for this many seconds."""
        until = str(int(self._clock() + seconds))
        return f"{until}.{self._sign(until)}"

    def allows(self, header: str) -> bool:
        """Whether an Authorization header carries a valid token."""
        scheme, _, token = header.partition(" ")
        until, _, signature = token.partition(".")
        if scheme != "Bearer" or not until.isascii() or not until.isdecimal():
            return False
        return hmac.compare_digest(signature.encode(), self._sign(until).encode()) and self._clock() < int(until)

    def _sign(self, until: str) -> str:
        return hmac.new(self._secret, until.encode(), hashlib.sha256).hexdigest()
