"""The broker's WebSocket, at which pages in a browser read a run: its block of nats.conf, and the origins it admits."""

from collections.abc import Sequence

ANYWHERE = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost")


def conf(host: str, port: int, origins: Sequence[str], tls: tuple[str, str] | None = None) -> str:
    """The ``websocket`` block of nats.conf. port: -1 takes a free one. tls: paths of certificate and key, both PEM."""
    allowed = ", ".join(f'"{origin}"' for origin in origins)
    security = f'tls {{ cert_file: "{tls[0]}", key_file: "{tls[1]}" }}' if tls else "no_tls: true"
    return f'\nwebsocket {{ host: "{host}", port: {port}, {security}, allowed_origins: [{allowed}] }}\n'


def origins_of(host: str, port: int, scheme: str = "http") -> list[str]:
    """The origins of pages that a listener of this host and port serves."""
    names = {host, *LOOPBACK} if host in (LOOPBACK[0], ANYWHERE) else {host}
    return [f"{scheme}://{_bracketed(name)}:{port}" for name in sorted(names)]


def address(scheme: str, host: str, port: int) -> str:
    """The address of a listener as a browser on the same machine names it, without a path."""
    return f"{scheme}://{_bracketed(LOOPBACK[0] if host == ANYWHERE else host)}:{port}"


def _bracketed(host: str) -> str:
    """A host as addresses contain it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
