"""The gateway's key of a run: for the simulated users, and for the operator of the machine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bus.broker.credentials import private
from headrace.config import Config
from headrace.launch.output import complain

if TYPE_CHECKING:
    from headrace.bus.connection import Bus

PER_MINUTE = 6000
"""Requests a minute of the key."""


def place(folder: Path) -> Path:
    """<run dir>/<id>/gateway.key, mode 0600: the key and nothing else."""
    return folder / "gateway.key"


@asynccontextmanager
async def key_of_run(config: Config, folder: Path, url: str, credentials: str) -> AsyncIterator[Path]:
    """The file of a key that the run's gateways accept while the block runs, of the tenant of headrace's own agent.

    url, credentials: of the run's broker. A key that an interrupted `headrace up` of the same run left is revoked.
    KeysRefused, BusError.
    """
    from headrace.bus.connection import Bus
    from headrace.bus.errors import BusError
    from headrace.gateway.tenants.store import add

    path, production = place(folder), config.production

    async def connect() -> "Bus":
        return await Bus.connect(url, role="operator", credentials=credentials)

    async with await connect() as bus:
        if path.is_file():
            await _revoke(bus, path)
        key = await add(bus, production.tenant, training=production.training_allowed, requests_per_minute=PER_MINUTE)
    private(path, key)
    try:
        yield path
    finally:
        try:
            async with await connect() as bus:
                await _revoke(bus, path)
        except BusError as error:
            complain(f"the key in {path} is not revoked, the next start of this run does it: {error}")


async def _revoke(bus: "Bus", path: Path) -> None:
    """End the key, then remove its file."""
    from headrace.gateway.tenants.keys import digest_of
    from headrace.gateway.tenants.store import KeysRefused, revoke

    with suppress(KeysRefused):  # somebody has ended it
        await revoke(bus, digest_of(path.read_text(encoding="ascii").strip())[:8])
    path.unlink()
