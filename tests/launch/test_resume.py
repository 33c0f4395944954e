"""A run that is killed at random moments, or whose disk fills up, trains every step once.

One that has ended trains more, or refuses.
"""

import asyncio
import json
import os
import random
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bus.connection import Bus
from headrace.messages import subjects as s
from headrace.messages.training import StepDone
from tests.launch.test_up import DEMO, FEW, Up, command, headrace, one_sentence, steps_in, up

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]
RUN, STEPS, KILLS, RECORDS = "r1", 4, 3, 60


async def killed_after(started: Up, bus: Bus, records: int) -> None:
    """kill -9 after this many new records of the ledger, or when it has ended by itself."""
    left = records
    async for _ in bus.follow("HR_LEDGER", s.LEDGER.where(run=RUN), start=await bus.last_seq("HR_LEDGER") + 1):
        left -= 1
        if not left:
            break
    started.process.kill()


async def steps_of(folder: Path, steps: int) -> list[int]:
    """Start the run again and let it end; the numbers of its steps, in the order of the stream."""
    async with up(folder, **FEW, **{"curriculum.steps": steps, "run.id": RUN}) as started:
        await started.line("run r")
        code, said = await started.end(600.0)
        assert code == 0, said
    audit = headrace(folder, "audit", RUN)
    assert audit[0] == 0 and audit[1]["balanced"] and audit[1]["in_flight"] == 0
    return await steps_in(folder / "runs" / RUN)


async def test_every_step_is_trained_once_after_kills_at_random_moments(tmp_path: Path) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    draws = random.Random(seed)
    for _ in range(KILLS):
        async with up(tmp_path, **FEW, **{"curriculum.steps": STEPS, "run.id": RUN}) as started:
            await started.line("run r")
            bus = await started.operator()
            killing = asyncio.ensure_future(killed_after(started, bus, draws.randint(1, RECORDS)))
            ending = asyncio.ensure_future(asyncio.to_thread(started.process.wait))
            await asyncio.wait({killing, ending}, return_when=asyncio.FIRST_COMPLETED)
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            await bus.close()
            await ending
            started.process.communicate()
        if (tmp_path / "runs" / RUN / "report.json").exists():
            break
    else:
        assert await steps_of(tmp_path, STEPS) == list(range(STEPS))
    settings = ("--set", f"run.id={RUN}", "--set", f"curriculum.steps={STEPS}")
    done = await asyncio.to_thread(command, tmp_path, "up", str(DEMO), *settings)
    assert done.returncode == 2 and one_sentence(done.stderr) and "would train nothing" in done.stderr
    assert await steps_of(tmp_path, STEPS + 1) == list(range(STEPS + 1))
    assert json.loads((tmp_path / "runs" / RUN / "report.json").read_text())["steps"] == STEPS + 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root and a kernel that mounts tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_run_ends_in_order_before_its_disk_is_full(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    async with up(small_disk, **FEW, **{"curriculum.steps": 500, "run.id": RUN}) as started:
        await started.line("run r")
        bus = await started.operator()
        async for record in bus.follow("HR_STEP", s.STEP.at(run=RUN)):
            if isinstance(record.message, StepDone):
                break
        await bus.close()
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - (7 << 20))
        code, said = await started.end(120.0)
    assert code == 3 and one_sentence(said) and "is nearly full" in said and f"run.id={RUN}" in said
    audit = headrace(small_disk, "audit", RUN)
    assert audit[0] == 0 and audit[1]["balanced"]
    ballast.unlink()
    before = await steps_in(small_disk / "runs" / RUN)
    assert before == list(range(len(before)))
    assert await steps_of(small_disk, len(before) + 1) == list(range(len(before) + 1))
