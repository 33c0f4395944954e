"""Several processes behind the actor: a killed rank ends the group, not the run, and changes no bit."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.runtime.supervisor import Supervisor
from headrace.config import Config, Mesh
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepDone, StepManifest
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from headrace.training.figures.layout import layout_of
from headrace.training.memory_plan import plan
from headrace.weights import snapshot, tensor_state
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.patience import PATIENCE_S
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import RunFeeder, config, new_run
from tests.support.world import POLICY

pytestmark = pytest.mark.anyio


def several(folder: Path, count: int, **trainer: Any) -> Config:
    """Small micro-batches, of one long episode or of two short ones: every rank has several, and the last round is not
    full. trainer: keys of the section, and replicate, expert and context of its mesh."""
    mesh: dict[str, int] = {n: trainer.pop(n) for n in ("replicate", "expert", "context") if n in trainer}
    mesh["shard"] = count // mesh.get("replicate", 1)
    section: dict[str, Any] = {"checkpoint_every": 2, "micro_tokens": 8, "mesh": Mesh(**mesh), **trainer}
    return config(folder, trainer=section, algorithm={"grad_clip": 0.05})


class Uneven(RunFeeder):
    """Every second episode ends after its first turn, so the order of operations is not that of indices."""

    async def close(self, name: str, sampled: Sequence[Trajectory], oldest: int) -> None:
        """As `RunFeeder`."""
        cut = [msgspec.structs.replace(made, turns=made.turns[: 1 + made.slot % 2]) for made in sampled]
        await super().close(name, cut, oldest)


async def alone(server: Server, folder: Path, steps: int, count: int = 1, **trainer: Any) -> list[str]:
    """Hashes of versions 0 to `steps` by one process, or by ranks that are not killed."""
    async with (
        await as_writers(server.url, server.credentials) as admin,
        await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
    ):
        feeder = Uneven(admin, new_run(), folder)
        async with living(Trainer, several(folder, count, **trainer), bus, feeder.run):
            for number in range(steps):
                await feeder.batch(number)
            await feeder.version(steps)
        return [feeder.hashes[number] for number in range(steps + 1)]


async def started_ranks() -> list[int]:
    """The ranks of this process, as soon as there are any."""
    async with asyncio.timeout(PATIENCE_S):
        while not (alive := ranks_of()):  # a group that begins again has none for a moment, and tells nobody
            await asyncio.sleep(0.02)
    return alive


@asynccontextmanager
async def supervised(setting: Config, server: Server, run: str, restarts: int = 100) -> AsyncIterator[None]:
    """A trainer that its supervisor starts again when it fails."""
    supervisor = Supervisor(setting, run, url=server.url, credentials=server.credentials, restarts=restarts)
    task = asyncio.create_task(supervisor.run([(Trainer, "trainer-1")]))
    try:
        yield
    finally:
        supervisor.stop()
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert not ranks_of(), "no rank outlives its trainer"


async def event(feeder: RunFeeder, kind: str) -> str:
    """The text of the first event of a kind from the run's trainer."""
    async with asyncio.timeout(PATIENCE_S):
        where = EVENT.where(run=feeder.run, actor="trainer", type="event")
        async for received in feeder.bus.follow("HR_EVENT", where):
            if received.message.kind == kind:
                return str(received.message.text)
    raise AssertionError


@pytest.mark.timeout(900)
async def test_two_ranks_make_the_same_versions_after_one_is_killed(
    connect: Connect, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 3, 2)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    async with supervised(several(tmp_path, 2), server, feeder.run):
        await feeder.batch(0)
        await feeder.version(1)
        (victim,) = ranks_of()
        os.kill(victim, signal.SIGKILL)
        assert f"rank 1 (process {victim}) was killed by SIGKILL" in await event(feeder, "actor_failed")
        await feeder.batch(1)
        await feeder.batch(2)
        last = await feeder.version(3)
    assert [feeder.hashes[number] for number in range(4)] == want
    assert snapshot.file_hash(last.path) == last.state_hash
    records = await feeder.steps()
    done = [record for record in records if isinstance(record, StepDone)]
    assert [record.step for record in done] == [0, 1, 2], "nothing is trained twice"
    assert all(record.max_abs_dlp == 0.0 and record.exact and record.rescored_tokens for record in done), "Law 5"
    assert all(record.incarnation == 0 for record in records)
    for each in (record.efficiency for record in done):
        assert each is not None
        assert sum(each.seconds.values()) == pytest.approx(each.wall_s, rel=1e-6)
        assert each.seconds["communication"] > 0.0 and each.seconds["straggler"] >= 0.0
        first, second = each.collectives_s
        assert min(first, second) > 0.0 and each.seconds["straggler"] >= each.waits_s[0] - 1e-9
        assert each.waits_s == (first - min(first, second), second - min(first, second))
        assert each.peak_bytes > 0 and each.planned_bytes == plan(POLICY, layout_of(several(tmp_path, 2))).total
        assert each.mfu is None, "nobody said what the peak of a CPU rank is"
    manifests = [record for record in records if isinstance(record, StepManifest)]
    assert all(record.layout is not None and record.layout.ranks == 2 for record in manifests)
    recorded = await of_run(await connect("replay"), several(tmp_path, 2), feeder.folder, feeder.run)
    (line,) = [line async for line in replay_steps(recorded, [2])]
    assert line.bitwise_equal and line.weights_hash == want[3], "two processes replay what two have done"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_collectives_of_training_count_in_every_rank(connect: Connect, server: Server, tmp_path: Path) -> None:
    """Without re-scoring, training alone has collectives."""
    feeder = Uneven(await connect(), new_run(), tmp_path)
    async with living(Trainer, several(tmp_path, 2, rescore=0), await connect("trainer"), feeder.run):
        await feeder.batch(0)
        await feeder.version(1)
    (done,) = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert done.efficiency is not None and len(done.efficiency.collectives_s) == 2
    assert min(done.efficiency.collectives_s) > 0.0 and min(done.efficiency.waits_s) == 0.0


def assert_near(path: str, other: Path, state_hash: str) -> None:
    """A published version is within 1e-5 of the one with this hash in a folder of runs."""
    published = tensor_state.read(path)
    expected = tensor_state.read(next(other.glob(f"*/snapshots/v*-{state_hash[:8]}.safetensors")))
    worst = max(float((published[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= 1e-5, f"{worst:.1e}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "expert"), [(4, 1), (2, 2), (4, 2), (4, 4)])
async def test_more_ranks_and_owned_experts(
    connect: Connect, server: Server, tmp_path: Path, count: int, expert: int
) -> None:
    """Within 1e-5 of one process after eight updates."""
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 8)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    async with living(Trainer, several(tmp_path, count, expert=expert), await connect("trainer"), feeder.run):
        for number in range(8):
            await feeder.batch(number)
        last = await feeder.version(8)
    done = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert all(record.max_abs_dlp == 0.0 and record.exact for record in done), "Law 5 over shards"
    assert feeder.hashes[0] == want[0]
    assert_near(last.path, tmp_path / "one", want[8])


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_resumed_with_fewer_and_fewer_ranks(connect: Connect, server: Server, tmp_path: Path) -> None:
    """4, then 2, then 1: the checkpoint does not depend on the number of ranks, so no new incarnation is needed."""
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 6)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    for life, count in enumerate((4, 2, 1)):
        async with living(Trainer, several(tmp_path, count), await connect("trainer"), feeder.run):
            for number in (2 * life, 2 * life + 1):
                await feeder.batch(number)
            last = await feeder.version(2 * life + 2)
    assert feeder.hashes[0] == want[0]
    assert_near(last.path, tmp_path / "one", want[6])
    assert all(record.incarnation == 0 for record in await feeder.steps())


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_random_rank_is_killed_twenty_times(connect: Connect, server: Server, tmp_path: Path) -> None:
    """Killed at a random moment of a step or between two, once in each of twenty steps: the same bits as an undisturbed
    run."""
    trials, draw, killed = 20, random.Random(18), set[int]()
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", trials, 4)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    async with supervised(several(tmp_path, 4), server, feeder.run):
        for number in range(trials):
            await feeder.version(number)
            filling = asyncio.create_task(feeder.batch(number))
            await asyncio.sleep(draw.random())  # not a wait: the moment is random
            alive = await started_ranks()
            pid = draw.choice(alive)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            await filling
        await feeder.version(trials)
    assert len(killed) == trials, "another process in every step, so every kill ended one"
    assert [feeder.hashes[number] for number in range(trials + 1)] == want
    done = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert sorted({record.step for record in done}) == list(range(trials)) and len(done) == trials
    assert all(record.staleness_max <= record.staleness_bound and record.max_abs_dlp == 0.0 for record in done)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("expert", "expected experts that 3 owners can share evenly, the policy has 4"),
        ("context", "expected a divisor of the policy's 1 key-value heads, got 3"),
    ],
)
async def test_work_that_cannot_be_divided_is_refused_before_a_process_starts(
    connect: Connect, tmp_path: Path, kind: str, says: str
) -> None:
    feeder = Uneven(await connect(), new_run(), tmp_path)
    actor = Trainer(several(tmp_path, 3, **{kind: 3}), await connect("trainer"), feeder.run, "t-1")
    await actor.start()
    async with asyncio.timeout(PATIENCE_S):
        error = await actor.failed
    assert says in str(error)
    await actor.shut(1.0)


KILLED = (
    "import msgspec, os, signal, sys, uvloop\n"
    "from headrace.actors.trainer.actor import Trainer\n"
    "from headrace.bus.runtime.supervisor import run_actors\n"
    "from headrace.config import Config\n"
    "from headrace.messages.training import StepDone\n"
    "class Killed(Trainer):\n"
    "    async def _write(self, record):\n"
    "        if isinstance(record, StepDone) and record.step == 1:\n"
    "            os.kill(os.getpid(), signal.SIGKILL)\n"
    "        return await super()._write(record)\n"
    "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
    "uvloop.run(run_actors([(Killed, 'killed')], config, sys.argv[2], url=sys.argv[3], credentials=sys.argv[4]))"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 2])
async def test_killed_between_an_update_and_its_outcome_it_makes_the_same_version(
    connect: Connect, server: Server, tmp_path: Path, count: int
) -> None:
    """A real process and SIGKILL: the update is made, its hash is known, and no record names it."""
    (tmp_path / "one").mkdir()
    want = await alone(server, tmp_path / "one", 3, count)
    feeder = Uneven(await connect(), new_run(), tmp_path)
    setting = several(tmp_path, count)
    arguments = [msgspec.json.encode(setting).decode(), feeder.run, server.url, str(server.credentials)]
    first = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, *arguments, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    await feeder.batch(0)
    await feeder.batch(1)
    assert await asyncio.wait_for(first.wait(), PATIENCE_S) == -signal.SIGKILL
    assert [(type(r).__name__, r.step) for r in await feeder.steps()][-1] == ("StepManifest", 1)
    async with living(Trainer, setting, await connect("trainer"), feeder.run, "t-2"):
        await feeder.batch(2)
        await feeder.version(3)
    assert [feeder.hashes[number] for number in range(4)] == want
    records = await feeder.steps()
    assert [(type(r).__name__, r.step, r.incarnation) for r in records] == [
        (kind, step, 0) for step in range(3) for kind in ("StepManifest", "StepDone")
    ]
    assert not list((feeder.folder / "snapshots").glob(".*.part")), "the killed process's unfinished file is deleted"


@pytest.mark.slow
@pytest.mark.parametrize("which", range(3))
async def test_a_rank_that_ends_as_its_trainer_stops_leaves_none_behind(
    connect: Connect, server: Server, tmp_path: Path, which: int
) -> None:
    """The others may never hear the order to stop: the one that ended would have passed it on."""
    feeder = Uneven(await connect(), new_run(), tmp_path)
    async with living(Trainer, several(tmp_path, 4), await connect("trainer"), feeder.run):
        await feeder.batch(0)
        await feeder.version(1)
        os.kill(sorted(ranks_of())[which], signal.SIGKILL)
    assert not ranks_of()
