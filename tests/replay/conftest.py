"""A finished run on disk, as the command line finds it: six steps, four of which failed, each in a way of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import uvloop

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server, open_store
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.cli.main import main
from headrace.config import Config
from headrace.messages.judging import Score
from headrace.messages.subjects import STEP
from headrace.messages.training import StepDone, StepFailed
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.recorded_run import RunFeeder, config, kill, new_run

Run = Callable[..., tuple[int, list[str], str]]


class Finished(NamedTuple):
    """A run that is over."""

    run: str
    setting: Config
    folder: Path
    outcomes: dict[int, StepDone | StepFailed]


class Poison(RunFeeder):
    """A recorded run in which some batches carry values that no engine would have written."""

    async def poisoned(self, number: int, reward: float) -> None:
        """One batch in which the attempts of each first slot have this reward."""
        publish = self.bus.publish

        async def spoilt(subject: str, message: msgspec.Struct, **options: object) -> int:
            if isinstance(message, Score) and message.slot == 0:
                message = msgspec.structs.replace(message, reward=reward)
            return await publish(subject, message, **options)  # type: ignore[arg-type]

        self.bus.publish = spoilt  # type: ignore[method-assign]
        try:
            await self.batch(number)
        finally:
            self.bus.publish = publish  # type: ignore[method-assign]


async def _make(root: Path) -> Finished:
    run = new_run()
    setting = config(root)
    async with Server(root / "broker") as server:
        async with (
            await as_writers(server.url, server.credentials) as admin,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as successor,
        ):
            await declare(admin)
            feeder = Poison(admin, run, root)
            first = Trainer(setting, bus, run, "t-1")
            await first.start()
            await feeder.batch(0)
            await feeder.batch(1)
            await feeder.batch(2, spoilt=True)
            await feeder.poisoned(3, 1e300)  # no float32 holds it
            await feeder.version(4)
            kill(first)
            strict = config(root, algorithm={"max_grad_norm": 1e-9})
            async with living(Trainer, strict, successor, run):
                await feeder.poisoned(4, 3e38)  # the sum of two of them is infinite
                await feeder.batch(5)
                await feeder.version(6)
            records = [r.message async for r in admin.history("HR_STEP", STEP.at(run=run))]
    (root / "broker").rename(root / run / "broker")
    (root / run / "config.json").write_bytes(msgspec.json.encode(setting))
    outcomes = {r.step: r for r in records if isinstance(r, StepDone | StepFailed)}
    return Finished(run, setting, root / run, outcomes)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run, made once; its trainer was killed after step 3 and another went on. Nobody may change it."""
    return uvloop.run(_make(tmp_path_factory.mktemp("finished")))


@pytest.fixture(scope="session")
def opened(finished: Finished) -> Iterator[Server]:
    """A broker on the finished run's store, so that not every command has to start one."""
    server = uvloop.run(open_store(finished.folder / "broker"))
    yield server
    uvloop.run(server.stop())


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: exit code, lines of standard output, standard error."""

    def run(*words: str) -> tuple[int, list[str], str]:
        capsys.readouterr()
        code = main(words)
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err

    return run
