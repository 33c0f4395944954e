"""A whole run of real processes in which two users' ratings become a version that a region holds."""

import signal
from pathlib import Path
from typing import Any

import aiohttp

from headrace.messages import subjects as s
from headrace.messages.weights import WeightsStaged
from tests.actors.feedback.test_processes import SETTINGS, Client, suite
from tests.launch.test_up import command, up

REGION = "eu"


async def rated_run(folder: Path, **changes: Any) -> str:
    """Run until version 1 of the branch is staged, then end in order; the run's id."""
    suite(folder)
    settings = SETTINGS | {"weights.region": REGION} | changes
    async with up(folder, **settings) as started, aiohttp.ClientSession() as http:
        await started.line("run r")
        client = Client(started, http)
        await client.call("GET", "/healthz")
        bus, run = await started.operator(), started.run.name
        assert command(folder, "gate", "latest", "--promote", "0").returncode == 0
        for _ in range(2):
            await client.rated()
        where = s.EVENT.where(run=f"{run}-feedback", type=WeightsStaged.type_name)
        async for received in bus.follow("HR_EVENT", where):
            if isinstance(received.message, WeightsStaged) and received.message.version == 1:
                break
        await bus.close()
        started.process.send_signal(signal.SIGINT)
        code, said = await started.end()
        assert code == 130, said
    return run
