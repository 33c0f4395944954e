"""Attempts that cannot be trained on: on record and replayed; batches of nothing else end the run."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.errors import Unrecoverable
from headrace.messages.base import Array
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.recorded_run import PER_STEP, RunFeeder, config, kill, new_run

pytestmark = pytest.mark.anyio


class Spoiling(RunFeeder):
    """Some attempts have a log-probability that is not a number."""

    spoilt: Sequence[tuple[str, int]] = ()
    """(group, slot) of each."""

    async def close(self, name: str, sampled: Sequence[Trajectory], oldest: int) -> None:
        await super().close(name, [nan(made) if (name, made.slot) in self.spoilt else made for made in sampled], oldest)


def nan(made: Trajectory) -> Trajectory:
    last = msgspec.structs.replace(made.turns[-1], logprobs=Array.of([-1.0, float("nan")], "<f4"))
    return msgspec.structs.replace(made, turns=(*made.turns[:-1], last))


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
async def test_the_record_names_them_and_a_replay_leaves_out_the_same(
    connect: Connect, tmp_path: Path, dies: bool
) -> None:
    """The first group keeps two of three attempts, the second one of three, which is none."""
    feeder = Spoiling(await connect(), new_run(), tmp_path)
    feeder.size, feeder.spoilt = 3, [("g000002", 1), ("g000003", 0), ("g000003", 2)]
    setting = config(tmp_path, trainer={"checkpoint_every": 50})
    first = Trainer(setting, await connect("trainer"), feeder.run, "t-1")
    await first.start()
    for number in range(2):
        await feeder.batch(number)
    await feeder.version(2)
    if dies:  # its successor takes both steps again
        kill(first)
    else:
        await first.shut(10.0)
    async with living(Trainer, setting, await connect("trainer"), feeder.run, "t-2"):
        await feeder.batch(2)
        await feeder.version(3)
    records = await feeder.steps()
    assert [(type(r).__name__, r.step, r.incarnation) for r in records] == [
        (kind, step, 0) for step in range(3) for kind in ("StepManifest", "StepDone")
    ]
    manifests = [record for record in records if isinstance(record, StepManifest)]
    done = [record for record in records if isinstance(record, StepDone)]
    (kept, gone) = ([slot[0] for slot in group.slots] for group in manifests[1].groups)
    assert [(each.trajectory_seq, each.reason) for each in done[1].left_out] == [
        (kept[1], "logprobs_not_finite"),
        (gone[0], "logprobs_not_finite"),
        (gone[2], "logprobs_not_finite"),
        (gone[1], "group_too_small"),
    ]
    assert [(record.trained_slots, len(record.left_out)) for record in done] == [(6, 0), (2, 4), (6, 0)]
    heard = [r.message async for r in feeder.bus.history("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer"))]
    told = [event for event in heard if getattr(event, "kind", "") == "left_out"]
    assert [(event.level, event.data["step"], event.data["logprobs_not_finite"]) for event in told] == [
        ("warning", 1, 3)
    ]
    recorded = await of_run(await connect("replay"), setting, feeder.folder, feeder.run)
    assert [replayed.bitwise_equal async for replayed in replay_steps(recorded, range(3))] == [True] * 3


async def test_three_batches_in_a_row_that_cannot_be_trained_on_end_the_run(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    first = Trainer(config(tmp_path), await connect("trainer"), feeder.run, "t-1")
    await first.start()
    try:
        for number in range(2):
            await feeder.batch(number, spoilt=True)
        await feeder.batch(2)  # the count begins again
        for number in range(3, 6):
            await feeder.batch(number, spoilt=True)
        error = await first.failed
    finally:
        await first.shut(1.0)
    assert isinstance(error, Unrecoverable) and "lacks log-probabilities" in str(error)
    failed = [record for record in await feeder.steps() if isinstance(record, StepFailed)]
    assert [(record.step, record.reason, record.dropped_slots) for record in failed] == [
        (step, "bad_batch", 2 * PER_STEP) for step in (0, 1, 3, 4, 5)
    ]
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-2"):
        await feeder.batch(6)
        await feeder.version(7)
    assert [record.step for record in await feeder.steps() if isinstance(record, StepDone)] == [2, 6]
