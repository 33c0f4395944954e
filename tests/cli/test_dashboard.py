"""`headrace dashboard RUN --users N`, while the run's own page is served."""

import asyncio
import time
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from headrace.dashboard.live.access import Access
from headrace.launch.page import write_place
from headrace.python_modules import module_command
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio


async def test_a_token_for_users_is_valid_for_the_minutes_that_were_asked_for(tmp_path: Path) -> None:
    """The run's own token, of 12 hours, was printed."""
    folder, now = tmp_path / "r1", [0.0]
    serving = Access(lambda: now[0])
    async with Server(folder / "broker"):
        write_place(folder, "http://127.0.0.1:1/", serving)
        for minutes in (1, 1000):
            began = time.time()
            words = module_command("headrace.cli", "dashboard", str(folder), "--users", str(minutes))
            process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
            told, _ = await process.communicate()
            ended = time.time()
            assert process.returncode == 0
            key, token = (line.partition("#key=")[2] for line in told.decode().splitlines())
            assert key == serving.key
            for moment, scope in ((began + 60 * minutes - 1, "users"), (ended + 60 * minutes + 1, "")):
                now[0] = moment
                assert serving.scope(f"Bearer {token}") == scope
