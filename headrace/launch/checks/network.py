"""Whether the ports are free, and whether the configured broker answers, accepts the keys and has its streams."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from headrace.bus.broker.credentials import of_run, unused
from headrace.bus.broker.server import find_binary, refuse_busy_port
from headrace.bus.errors import BusError
from headrace.config import Config
from headrace.launch.checks.finding import Finding, Roles, bad, good, wanted

ANSWER_S = 1.0
"""Seconds that an address may take to answer."""


async def check(config: Config, roles: Roles = frozenset()) -> AsyncIterator[Finding]:
    """Findings about [bus] and the ports of [dashboard] and [production]. roles: as in `host.check`."""
    section = config.bus
    if section.url:
        async for finding in _broker(section.url, section.credentials, config.run.id):
            yield finding
    else:
        try:
            find_binary()
            refuse_busy_port("127.0.0.1", section.port, "[bus] port")
            yield good("bus", "nats-server is installed and its port is free")
        except BusError as error:
            yield bad("bus", str(error))
        if section.credentials:
            yield bad("bus.credentials", unused(section.credentials))
    if config.dashboard.enabled and not roles:
        try:
            refuse_busy_port(config.dashboard.host, config.dashboard.port, "[dashboard] port")
        except BusError as error:
            yield bad("dashboard", str(error))
    if config.production.enabled and wanted(roles, "gateway"):
        try:
            refuse_busy_port(config.production.host, config.production.port, "[production] port")
            yield good("production", f"the gateway can listen on {config.production.host}")
        except BusError as error:
            yield bad("production", str(error))
    if section.blob_dir and not Path(section.blob_dir).is_dir():
        yield bad("bus.blob_dir", f"there is no folder {section.blob_dir}; create it, or set another bus.blob_dir")
    if section.otlp_endpoint:
        yield _answers("bus.otlp_endpoint", section.otlp_endpoint, "start the collector, or empty the key")


async def _broker(url: str, credentials: str, run: str) -> AsyncIterator[Finding]:
    from headrace.bus.connection import Bus
    from headrace.bus.nats import streams

    if credentials and not Path(credentials).exists():
        yield bad(
            "bus.credentials",
            f"there is no folder {credentials}; make it with: python -m headrace.bus.broker.credentials {credentials}",
        )
        return
    answer = _answers("bus.url", url.split(",")[0], "start nats-server, or set another bus.url")
    if not answer.good:
        yield answer
        return
    try:
        keys = of_run(credentials, run)
        async with await Bus.connect(url, role="operator", credentials=keys or None) as bus:
            await streams.require(bus.connection)
        yield good("bus.url", f"{url} answers and has every stream")
    except BusError as error:
        yield bad("bus.url", str(error))


def _answers(key: str, url: str, fix: str) -> Finding:
    """Whether something accepts a connection at an address."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return bad(key, f"nothing answers at {url} ({reason}); {fix}")
    return good(key, f"{url} answers")
