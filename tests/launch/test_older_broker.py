"""A power cut takes the newest records of the broker and not the trainer's checkpoint: the run goes on and balances."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from headrace.bus.broker.server import running
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from tests.launch.test_up import FEW, Up, command, up

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]


async def checkpoint(started: Up, after: int) -> int:
    """The version of the first checkpoint beyond a version."""
    bus = await started.operator()
    where = s.EVENT.where(run=started.run.name, actor="trainer", type="event")
    async for received in bus.follow("HR_EVENT", where):
        event = received.message
        if isinstance(event, Event) and event.kind == "checkpoint" and int(event.data["version"]) > after:
            break
    await bus.close()
    return int(event.data["version"])


@pytest.mark.parametrize("bound", [0, 1])
async def test_a_broker_older_than_the_checkpoint(tmp_path: Path, bound: int) -> None:
    changes = {"curriculum.steps": 500, "curriculum.staleness": bound, "trainer.checkpoint_every": 1, "run.id": "r1"}
    async with up(tmp_path, **FEW, **changes) as started:
        await started.line("run r")
        copied = await checkpoint(started, 2)
        broker, folder = running(started.run / "broker"), started.run / "broker"
        assert broker is not None
        os.kill(broker.pid, signal.SIGSTOP)  # the copy is that of one moment
        shutil.copytree(folder / "store", tmp_path / "store")
        os.kill(broker.pid, signal.SIGCONT)
        await checkpoint(started, copied + 1)
        started.process.kill()
        started.process.communicate()
        started.nobody_is_left()
    shutil.rmtree(folder / "store")
    (tmp_path / "store").rename(folder / "store")

    async with up(tmp_path, **FEW, **changes | {"curriculum.steps": copied + 6}) as again:
        await again.line("run r")
        code, said = await again.end(400.0)
        assert code == 0, said
    audit = command(tmp_path, "audit", "r1")
    report = json.loads(audit.stdout)
    assert audit.returncode == 0 and report["balanced"], audit.stderr
    assert report["staleness_max"] <= report["staleness_bound"] == bound
