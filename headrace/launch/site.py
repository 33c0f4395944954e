"""The addresses of the live page of a run that the files of `headrace deploy` start.

Page and WebSocket listen on the broker's host, at ports that are known before anything starts: the broker admits the
page's origin, and the operator forwards both ports by ssh while they listen on loopback, as they do by default.
"""

import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.bus.broker import websocket
from headrace.bus.broker.tls import server_context
from headrace.config import Config, ConfigError

PORT = 8090
"""HTTP port of the page where `[dashboard] port` is 0; the broker's WebSocket has the next one."""
LOCAL = ("127.", "localhost", "::1")
"""How hosts of loopback begin."""


class Site(NamedTuple):
    """Addresses of page and WebSocket, and where both listen."""

    host: str
    port: int
    websocket: str
    """ws:// or wss:// address, as the page's browser uses it."""
    websocket_host: str
    websocket_port: int

    @property
    def tls(self) -> bool:
        """Whether the broker's WebSocket has a certificate. The page has it, too, unless it is on loopback."""
        return self.websocket.startswith("wss:")

    @property
    def local(self) -> bool:
        """Whether the page listens on loopback alone."""
        return self.host.startswith(LOCAL)

    @property
    def scheme(self) -> str:
        """http or https, of the page."""
        return "https" if self.tls and not self.local else "http"

    @property
    def page(self) -> str:
        """The page's address."""
        return websocket.address(self.scheme, self.host, self.port) + "/"

    @property
    def origins(self) -> list[str]:
        """Origins that the broker admits: the page's, and that of a page with its port on the operator's machine."""
        local = websocket.origins_of(self.host, self.port, self.scheme)
        return sorted({*local, *websocket.origins_of(websocket.LOOPBACK[0], self.port)})

    def conf(self, credentials: str, host: str = "") -> str:
        """The broker's block of nats.conf. credentials: its folder there. host: listen here instead."""
        pair = (f"{credentials}/server.pem", f"{credentials}/server.key") if self.tls else None
        return websocket.conf(host or self.websocket_host, self.websocket_port, self.origins, pair)

    @property
    def forwards(self) -> str:
        """Options of ssh that forward page and WebSocket."""
        places = (urlsplit(self.page).netloc, f"{urlsplit(self.websocket).hostname}:{self.websocket_port}")
        return " ".join(f"-L {place.rpartition(':')[2]}:{place}" for place in places)

    def context(self, credentials: Path, host: str = "") -> ssl.SSLContext | None:
        """The page's TLS; None where it is plain. host: listens here instead. ConfigError without a certificate."""
        if not self.tls or (host or self.host).startswith(LOCAL):
            return None
        try:
            return server_context(credentials)
        except ValueError as error:
            raise ConfigError(
                f"dashboard.websocket is an https:// address, so the page is served by https: {error}"
            ) from None


def site_of(config: Config) -> Site | None:
    """Where page and WebSocket of a configuration are; None without a page. ConfigError."""
    section = config.dashboard
    if not section.enabled:
        return None
    port = section.port or PORT
    if not section.websocket:
        if port == 65535:
            raise ConfigError("dashboard.port: expected less than 65535, because the WebSocket has the next port")
        return Site(section.host, port, websocket.address("ws", section.host, port + 1), section.host, port + 1)
    try:
        named = urlsplit(section.websocket)
        host, number = named.hostname, named.port or (443 if named.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"dashboard.websocket: {section.websocket} is no address: {error}") from None
    if not host:
        raise ConfigError(f"dashboard.websocket: {section.websocket} names no host; expected http://HOST:PORT")
    if (host, number) == (section.host, port):
        raise ConfigError(f"dashboard.websocket: {section.websocket} is the page's own port; choose another")
    return Site(section.host, port, section.websocket.replace("http", "ws", 1), host, number)
