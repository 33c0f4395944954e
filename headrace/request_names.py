"""The Host and Origin headers that a listener accepts.

A browser lets any page send requests to any address, so a listener on loopback is in reach of every site that its user
opens. Two headers, which a page cannot choose, say so: Origin names the page, and Host is the name under which the
browser found the address, which for a site that resolves its own name to 127.0.0.1 is still the site's name.
"""

import re
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


class RequestNames:
    """The names of one listener: loopback, this machine's, the address of each connection, and configured ones."""

    def __init__(self, hosts: Iterable[str] = (), urls: Iterable[str] = ()) -> None:
        """hosts: further names. urls: further addresses, whose names count as hosts and whose pages may ask."""
        parts = [urlsplit(url.lower()) for url in urls]
        names = {socket.gethostname(), *hosts, *(part.hostname or "" for part in parts)} - {""}
        self._hosts = LOOPBACK | {host.lower() for host in names}
        self._origins = frozenset(f"{part.scheme}://{part.netloc}" for part in parts)

    def refusal(self, hosts: Sequence[str], origins: Sequence[str], address: str) -> str:
        """Why a request is refused; empty for one that is not.

        hosts, origins: the values of its Host and Origin headers. address: this end of its connection, without a port.
        """
        match = _HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
        name = match[1].removeprefix("[").removesuffix("]") if match else ""
        if not name or (name not in self._hosts and name != address):
            return f"expected one header Host with a name of this listener, got {list(hosts)[:2]!a:.200}"
        if origins and (len(origins) > 1 or origins[0].lower() not in self._origins):
            return f"pages of another origin may not ask here, got Origin {list(origins)[:2]!a:.200}"
        return ""
