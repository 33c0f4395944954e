"""The next step computes its gradient while a version is copied and hashed; the records keep their order."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import pytest

from headrace.actors.trainer.actor import OnRecord, Trainer
from headrace.config import Mesh
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.replay.fetching import Records
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.records import RankRecords as Sent
from headrace.training.trainer import PolicyTrainer
from tests.conftest import Connect
from tests.support import world
from tests.support.actors import living
from tests.support.recorded_run import GROUP, PER_STEP, RunFeeder, config, new_run

pytestmark = pytest.mark.anyio


class Late(Trainer):
    """The outcome of step 0 is written when the gradient of step 1 is computed, and not before."""

    async def start(self) -> None:
        self.computed = asyncio.Event()
        await super().start()

    async def _compute(
        self,
        trainer: PolicyTrainer,
        manifest: StepManifest,
        fetched: Records,
        announcing: "Future[OnRecord]",
        raised_before: str,
    ) -> StepOutcome:
        if manifest.step == 1:
            loop, wait = asyncio.get_running_loop(), announcing.result

            def computed(timeout: float | None = None) -> OnRecord:
                loop.call_soon_threadsafe(self.computed.set)
                return wait(timeout)

            announcing.result = computed  # type: ignore[method-assign]
        return await super()._compute(trainer, manifest, fetched, announcing, raised_before)

    async def _write(self, record: StepManifest | StepDone | StepFailed) -> int:
        if isinstance(record, StepDone) and record.step == 0:
            await self.computed.wait()
        return await super()._write(record)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_a_gradient_is_computed_before_the_outcome_of_the_step_before(
    connect: Connect, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr("headrace.training.batches.batch.tensors_of", built.append)
    expected: list[int] = []
    sent = Sent.sent

    def remembered(self: Sent, sequences: Iterable[int]) -> list[int]:
        wanted = list(sequences)
        out = sent(self, wanted)
        assert sorted(out) == sorted(wanted), "all of a batch was sent before its step"
        expected.extend(out)
        return out

    monkeypatch.setattr(Sent, "sent", remembered)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    settings = config(tmp_path, trainer={"mesh": Mesh(shard=ranks), "micro_tokens": 20, "checkpoint_every": 10})
    async with living(Late, settings, await connect("trainer"), feeder.run):
        await feeder.version(0)
        for number in range(2 * PER_STEP):
            name = f"g{number:06d}"
            wanted = [world.Sampled(name, slot, number) for slot in range(GROUP)]
            await feeder.close(name, world.episodes(feeder.models, wanted, [0] * 4), 0)
        await feeder.version(2)
    assert not built, "no tensors of a batch are built in its step"
    assert len(expected) == (2 * PER_STEP * GROUP if ranks > 1 else 0)
    records = await feeder.steps()
    assert [(type(record).__name__, record.step) for record in records] == [
        (kind, step) for step in range(2) for kind in ("StepManifest", "StepDone")
    ]
    first, second = (record for record in records if isinstance(record, StepDone))
    assert second.max_abs_dlp == 0.0 and second.exact and second.rescored_tokens, "Law 5, while version 1 was copied"
    assert first.state_hash == feeder.hashes[1] and second.state_hash == feeder.hashes[2]
    for each in (first.efficiency, second.efficiency):
        assert each is not None and sum(each.seconds.values()) == pytest.approx(each.wall_s, rel=1e-6)
    assert first.efficiency is not None and first.efficiency.between_s == 0.0, "no update before it"
    assert second.efficiency is not None and second.efficiency.between_s > 0.0
    both = first.efficiency.wall_s + second.efficiency.wall_s
    assert second.efficiency.between_s < both, "it begins in the wall time of the step before"
    monkeypatch.undo()  # a replay builds the batch itself
    recorded = await of_run(await connect("replay"), settings, feeder.folder, feeder.run)
    assert [line.bitwise_equal async for line in replay_steps(recorded, range(2))] == [True, True]
