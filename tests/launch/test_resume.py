"""A run that is killed at random moments trains every step once; one that has ended trains more, or refuses."""

import asyncio
import json
import random
import secrets
from pathlib import Path

import pytest

from headrace.bus.broker.server import open_store
from headrace.bus.connection import Bus
from headrace.messages import subjects as s
from headrace.messages.training import StepDone
from tests.launch.test_up import DEMO, FEW, Up, command, headrace, one_sentence, up

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
    async with await open_store(folder / "runs" / RUN / "broker") as store:
        async with await Bus.connect(store.url, role="operator", credentials=store.credentials) as bus:
            records = [record.message async for record in bus.history("HR_STEP", s.STEP.at(run=RUN))]
    return [message.step for message in records if isinstance(message, StepDone)]


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
