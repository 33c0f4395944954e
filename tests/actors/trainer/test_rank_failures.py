"""Steps that fail in a group of processes: one that raises is a failed step as with one process, one that hangs ends
after a limit, and a process whose thread does not return from its group is replaced."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.runtime.supervisor import EXIT_FOR_GOOD, EXIT_GAVE_UP, Supervisor
from headrace.config import Config
from headrace.messages.training import StepDone, StepFailed
from headrace.registry import admit
from headrace.training.parallel.nodes import ranks as nodes
from tests.actors.trainer.test_ranks import event, several, supervised
from tests.conftest import Connect
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import RunFeeder, new_run

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


def failing(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: str, loss: str, count: int = 2, **trainer: Any
) -> tuple[Config, Path]:
    """A configuration with a loss of `failing_losses`, and the file while which these ranks fail."""
    marker = folder / "fail"
    monkeypatch.setenv("FAILING_RANKS", ranks)
    monkeypatch.setenv("FAILING_WHILE", str(marker))
    made = several(folder, count, **trainer)
    admit("losses", [name := f"tests.support.failing_losses:{loss}"])
    algorithm = msgspec.structs.replace(made.algorithm, weighting=name)
    return msgspec.structs.replace(made, algorithm=algorithm), marker


async def versions(feeder: RunFeeder, marker: Path) -> None:
    """Three batches, the second of which raises."""
    await feeder.batch(0)
    await feeder.version(1)
    marker.touch()
    await feeder.batch(1)
    await feeder.version(2)
    marker.unlink()
    await feeder.batch(2)
    await feeder.version(3)


@pytest.mark.parametrize(
    "ranks", ["1", pytest.param("0", marks=pytest.mark.slow), pytest.param("0,1", marks=pytest.mark.slow)]
)
async def test_a_step_that_raises_in_a_group_fails_as_with_one_process(
    connect: Connect,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ranks: str,
) -> None:
    """Before, every exception of a step ended the group, and its successor took the same step without end."""
    setting, marker = failing(monkeypatch, tmp_path, ranks, "raising", checkpoint_every=1)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with supervised(setting, server, feeder.run, restarts=1):
        await versions(feeder, marker)
    records = await feeder.steps()
    (failed,) = [record for record in records if isinstance(record, StepFailed)]
    assert (failed.step, failed.reason, failed.incarnation) == (1, "exception", 0)
    assert failed.detail in [f"rank {rank}: RuntimeError: out of luck" for rank in ranks.split(",")]
    assert failed.state_hash == feeder.hashes[1] == feeder.hashes[2]
    done = [record for record in records if isinstance(record, StepDone)]
    assert [(record.step, record.max_abs_dlp) for record in done] == [(0, 0.0), (2, 0.0)]
    told = await event(feeder, "actor_failed")
    assert "StepRaised: rank" in told
    log = capfd.readouterr().err
    assert log.count("rank_started") == 2, "both lives are in the trainer's log"
    if ranks == "1":
        assert "raised in a step: RuntimeError: out of luck" in told
        assert 'tests/support/failing_losses.py", line' in log, "with the whole traceback"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_run_in_which_every_step_raises_ends_and_goes_on_with_the_next_batch_when_it_is_resumed(
    connect: Connect, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Before, such a run lost all of its batches, and over ranks it restarted at each of them."""
    setting, marker = failing(monkeypatch, tmp_path, str(count - 1), "raising", count, checkpoint_every=1)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    supervisor = Supervisor(setting, feeder.run, url=server.url, credentials=server.credentials)
    ended = asyncio.create_task(supervisor.run([(Trainer, "trainer-1")]))
    await feeder.batch(0)
    await feeder.version(1)
    marker.touch()
    for number in (1, 2, 3):
        await feeder.batch(number)
    assert await asyncio.wait_for(ended, PATIENCE_S) == EXIT_FOR_GOOD
    told = await event(feeder, "actor_gave_up")
    assert "Unrecoverable: 3 steps in a row raised RuntimeError: out of luck, the last one is step 3: correct" in told
    records = await feeder.steps()
    assert [record.step for record in records if isinstance(record, StepFailed)] == [1, 2, 3]
    marker.unlink()
    async with supervised(setting, server, feeder.run, restarts=0):
        await feeder.batch(4)
        await feeder.version(5)
    assert [record.step for record in await feeder.steps() if isinstance(record, StepDone)] == [0, 4]


async def goes_on(feeder: RunFeeder, marker: Path) -> str:
    """A step that fails until its group has ended, and the versions after it. Returns the text of the failure."""
    await feeder.batch(0)
    await feeder.version(1)
    marker.touch()
    await feeder.batch(1)
    told = await event(feeder, "actor_failed")
    marker.unlink()
    await feeder.version(2)
    done = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert [(record.step, record.incarnation) for record in done] == [(0, 0), (1, 0)]
    return told


@pytest.mark.slow
async def test_a_step_in_which_nothing_moves_ends_its_group_and_is_taken_again(
    connect: Connect,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before, a rank that hung was waited for thirty days."""
    setting, marker = failing(monkeypatch, tmp_path, "1", "blocking", checkpoint_every=1, stall_s=10.0)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with supervised(setting, server, feeder.run, restarts=1):
        told = await goes_on(feeder, marker)
    assert "no exchange of the ranks ended within 10 s" in told and "raise [trainer] stall_s" in told
    log = capfd.readouterr().err
    assert 'tests/support/failing_losses.py", line' in log and " in blocking" in log, (
        "the stack of the thread that hung"
    )


@pytest.mark.slow
async def test_a_rank_that_a_signal_stops_is_killed_and_its_step_is_taken_again(
    connect: Connect, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, nobody looked at ranks: `headrace up` sees its own children alone."""
    monkeypatch.setattr(nodes, "STOPPED_S", 0.5)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with supervised(several(tmp_path, 2), server, feeder.run, restarts=1):
        await feeder.batch(0)
        await feeder.version(1)
        (rank,) = ranks_of()
        os.kill(rank, signal.SIGSTOP)
        await feeder.batch(1)
        assert f"rank 1: process {rank} was stopped by a signal" in await event(feeder, "actor_failed")
        await feeder.version(2)


ALONE = (
    "import msgspec, sys, uvloop\n"
    "from headrace.actors.trainer import other_ranks\n"
    "from headrace.actors.trainer.actor import Trainer\n"
    "from headrace.bus.runtime.supervisor import run_actors\n"
    "from headrace.config import Config\n"
    "from headrace.registry import admit\n"
    "other_ranks.BLOCKED_S = 1.0\n"
    "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
    "admit('losses', [config.algorithm.weighting])\n"
    "uvloop.run(run_actors([(Trainer, 'alone')], config, sys.argv[2], url=sys.argv[3], credentials=sys.argv[4]))"
)


@pytest.mark.slow
async def test_a_process_whose_thread_stays_in_a_lost_group_ends(
    connect: Connect, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process: its thread blocks in a step and a rank is killed. Before, the process stayed for ever, and after
    another failure its next trainer found that it was in a group already."""
    setting, marker = failing(monkeypatch, tmp_path, "0", "blocking", checkpoint_every=1)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    arguments = [msgspec.json.encode(setting).decode(), feeder.run, server.url, str(server.credentials)]
    path = {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", ALONE, *arguments, env=os.environ | path)
    await feeder.batch(0)
    await feeder.version(1)
    marker.touch()
    await feeder.batch(1)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / "fail.reached").exists() or len(await feeder.steps()) < 3:
                await asyncio.sleep(0.05)
        (rank,) = ranks_of(first.pid)
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.wait_for(first.wait(), PATIENCE_S) == EXIT_GAVE_UP
    finally:
        if first.returncode is None:
            first.kill()
            await first.wait()
    told = await event(feeder, "process_ends")
    assert "does not return from its lost group" in told and f"rank 1 (process {rank}) was killed by SIGKILL" in told
    marker.unlink()
    async with supervised(setting, server, feeder.run, restarts=0):
        await feeder.version(2)


@pytest.mark.slow
async def test_a_process_whose_thread_hangs_while_its_group_is_opened_ends(
    connect: Connect, server: Server, tmp_path: Path
) -> None:
    """Its ranks end, and it could open no other group."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    checkpoints = tmp_path / feeder.run / "checkpoints"
    checkpoints.mkdir(parents=True)
    os.mkfifo(checkpoints / "checkpoint.safetensors")  # who opens it waits for a writer
    setting = several(tmp_path, 2, stall_s=10.0)
    arguments = [msgspec.json.encode(setting).decode(), feeder.run, server.url, str(server.credentials)]
    path = {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ALONE, *arguments, env=os.environ | path)
    try:
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == EXIT_GAVE_UP
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    told = await event(feeder, "process_ends")
    assert "does not return from its lost group" in told
    assert "rank 1 (process" in told and "Timed out waiting 10000ms" in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_benchmark_kills_every_rank_and_meets_its_targets() -> None:
    words = (sys.executable, "-m", "benchmarks.rank_kills", "--trials", "4")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills_by_rank"] == {"0": 1, "1": 1, "2": 1, "3": 1} and figures["process_restarts"] == 1
