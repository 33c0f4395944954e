"""Tells systemd that the process is ready, alive or stopping (sd_notify); does nothing without systemd."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator


def notify(state: str) -> bool:
    """Send one state such as ``READY=1``; False when systemd did not start the process."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(state.encode(), address)
    return True


@contextlib.asynccontextmanager
async def ready() -> AsyncIterator[None]:
    """READY, then a WATCHDOG at half of the unit's interval from the event loop, and STOPPING at the end."""
    notify("READY=1")
    interval = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    beats = asyncio.create_task(_beat(interval)) if interval and notify("WATCHDOG=1") else None
    try:
        yield
    finally:
        notify("STOPPING=1")
        if beats is not None:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)


async def _beat(interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        notify("WATCHDOG=1")
