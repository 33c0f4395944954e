"""The bus does not load aiohttp; a program that uses aiohttp gets all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus

LOADED = "any(name.startswith('aiohttp.') for name in sys.modules)"
CODE = f"""
import sys
import headrace.bus.connection
assert not {LOADED}
from aiohttp import web
import aiohttp
assert {LOADED} and web.Application and aiohttp.ClientSession
import headrace.bus.lazy
headrace.bus.lazy.delay_import("aiohttp")
headrace.bus.lazy.delay_import("no_such_package")
assert aiohttp is sys.modules["aiohttp"] and "no_such_package" not in sys.modules
"""


def test_aiohttp_is_loaded_at_its_first_use() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")  # in nats-py
async def test_a_websocket_reaches_the_broker(tmp_path: Path) -> None:
    async with Server(tmp_path, origins=("http://127.0.0.1:1",)) as server:
        async with await Bus.connect(server.websocket, role="admin", credentials=server.credentials) as bus:
            assert b"account_info" in await bus.connection.api("INFO")
