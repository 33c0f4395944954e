"""The trainer over a real broker: batches in the order of closings, and the same bits after any kill."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.actors.trainer.actor import Trainer
from headrace.bus.connection import Bus
from headrace.bus.errors import MessageGone, Unrecoverable, WrongSequence
from headrace.messages.plugins import Plugin
from headrace.messages.subjects import CLOSE, EVENT, STEP
from headrace.messages.training import Behaviour, RecordsPurged, StepDone, StepFailed, StepManifest
from headrace.replay.recorded_run import of_run
from headrace.replay.step import replay_steps
from headrace.training.figures.layout import layout_of
from headrace.training.memory_plan import plan
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer
from headrace.weights import snapshot
from tests.conftest import Connect
from tests.support import chat_formats
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.raising_trainer import Raising
from tests.support.recorded_run import GROUP, PER_STEP, RunFeeder, config, kill, new_run
from tests.support.world import POLICY

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def straight(server: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Hashes of versions 0 to 5 of a trainer that was never killed."""
    folder = tmp_path_factory.mktemp("straight")
    admin = await as_writers(server.url, server.credentials)
    bus = await Bus.connect(server.url, role="trainer", credentials=server.credentials)
    feeder = RunFeeder(admin, new_run(), folder)
    async with living(Trainer, config(folder), bus, feeder.run):
        for number in range(5):
            await feeder.batch(number)
        await feeder.version(5)
    await admin.close()
    await bus.close()
    return [feeder.hashes[number] for number in range(6)]


async def test_batches_become_versions_in_the_order_of_closings(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process keeps memory of earlier tests, so that its growth may be none.
    monkeypatch.setattr("headrace.training.figures.memory.without_policy", lambda: 0)
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    began = time.perf_counter()
    settings = config(tmp_path, trainer={"peak_tflops": 0.5})
    async with living(Trainer, settings, await connect("trainer"), feeder.run):
        for number in range(3):
            await feeder.batch(number)
        last = await feeder.version(3)
    elapsed = time.perf_counter() - began
    records = await feeder.steps()
    assert [(type(r).__name__, r.step) for r in records] == [
        (kind, step) for step in range(3) for kind in ("StepManifest", "StepDone")
    ]
    closings = [(r.seq, r.message.group) async for r in feeder.bus.history("HR_SCORE", CLOSE.where(run=feeder.run))]
    named = [(g.close_seq, g.group) for r in records if isinstance(r, StepManifest) for g in r.groups]
    assert named == closings
    done = [r for r in records if isinstance(r, StepDone)]
    assert all(r.max_abs_dlp == 0.0 and r.exact and r.rescored_tokens for r in done), "Law 5"
    assert [r.staleness_max for r in done] == [0, 1, 1]
    assert done[1].staleness == {"0": 12, "1": 4}
    assert all(r.trained_slots == GROUP * PER_STEP for r in done)
    acts = Behaviour(calls_per_turn=1.0, reads_before_edit=0.0, tested=1.0, lint_fixed=0.0, asked=0.0)
    assert [r.behaviour for r in done] == [acts] * 3
    figures = [r.efficiency for r in done if r.efficiency is not None]
    assert len(figures) == 3
    for each in figures:
        assert sum(each.seconds.values()) == pytest.approx(each.wall_s, rel=1e-6)
        assert all(each.seconds[cause] > 0.0 for cause in ("busy", "batch", "rescore", "publish", "records"))
        assert each.seconds["communication"] == each.seconds["straggler"] == 0.0, "one process"
        assert each.collectives_s == () and each.peak_bytes > 0, "resident memory"
        assert each.planned_bytes == plan(POLICY, layout_of(settings)).total
        assert each.peak_to_plan == each.figures()["peak_to_plan"] == each.peak_bytes / each.planned_bytes
        assert each.mfu is not None and each.hfu is not None and 0.0 < each.mfu < each.hfu < 1.0
    assert sum(each.wall_s for each in figures) < elapsed, "no moment counts in two steps"
    assert all(r.seconds <= f.seconds["busy"] for r, f in zip(done, figures, strict=True))
    assert snapshot.file_hash(last.path) == last.state_hash == done[-1].state_hash
    assert [path.name[:9] for path in sorted((feeder.folder / "snapshots").iterdir())] == ["v00000002", "v00000003"]


async def test_a_manifest_names_the_plugins_of_its_records_and_another_source_is_refused(
    connect: Connect, tmp_path: Path
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    reward = Plugin(seam="rewards", name="mine:half", source="a" * 64)  # no module of this node: the step needs none
    feeder.plugins = (reward,)
    trainer = Trainer(config(tmp_path), await connect("trainer"), feeder.run, "t-1")
    await trainer.start()
    try:
        await feeder.batch(0)
        await feeder.version(1)
        manifest, done = await feeder.steps()
        assert isinstance(manifest, StepManifest) and manifest.plugins == (reward,)
        assert isinstance(done, StepDone)
        feeder.plugins = (msgspec.structs.replace(reward, source="b" * 64),)
        await feeder.batch(1)
        error = await trainer.failed
    finally:
        await trainer.shut(1.0)
    assert isinstance(error, Unrecoverable) and "mine:half has source hash bbbbbbbbbbbb" in str(error)
    assert len(await feeder.steps()) == 2, "no manifest of the refused batch"


async def test_a_checkpoint_that_cannot_be_trained_is_not_tried_again(connect: Connect, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(chat_formats.tokenizer_json())
    policy = {"checkpoint": str(folder)}

    async def refusal() -> BaseException:
        trainer = Trainer(config(tmp_path, policy=policy), await connect("trainer"), new_run(), "t-1")
        await trainer.start()
        try:
            failure: BaseException = await trainer.failed
        finally:
            await trainer.shut(1.0)
        return failure

    error = await refusal()
    assert isinstance(error, Unrecoverable) and "has no chat template" in str(error)
    (folder / "chat_template.jinja").write_text(chat_formats.CHATML)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "config.json").write_text('{"model_type": "phi3"}')
    error = await refusal()
    assert isinstance(error, Unrecoverable) and "model_type 'phi3' is not supported" in str(error)


@pytest.mark.parametrize("killed_after", [1, 2, 3])
async def test_after_a_kill_between_steps_the_bits_are_the_same(
    connect: Connect, tmp_path: Path, straight: list[str], killed_after: int
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    first = Trainer(config(tmp_path), await connect("trainer"), feeder.run, "t-1")
    await first.start()
    for number in range(killed_after):
        await feeder.batch(number)
    await feeder.version(killed_after)
    kill(first)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-2"):
        for number in range(killed_after, 5):
            await feeder.batch(number)
        await feeder.version(5)
    assert [feeder.hashes[number] for number in range(6)] == straight
    records = await feeder.steps()
    assert [r.step for r in records if isinstance(r, StepDone)] == list(range(5)), "nothing is trained twice"
    assert [r.step for r in records if isinstance(r, StepManifest)] == list(range(5))
    assert all(r.incarnation == 0 for r in records)


class Hanging(Trainer):
    """Dies between the manifest of a step and its outcome."""

    at = 2

    async def _compute(self, trainer: PolicyTrainer, manifest: StepManifest, *rest: Any) -> StepOutcome:
        if manifest.step == self.at:
            await asyncio.get_running_loop().create_future()
        return await super()._compute(trainer, manifest, *rest)


async def test_a_published_manifest_is_executed_before_anything_new(
    connect: Connect, tmp_path: Path, straight: list[str]
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    first = Hanging(config(tmp_path), await connect("trainer"), feeder.run, "t-1")
    await first.start()
    for number in range(3):
        await feeder.batch(number)
    async for received in feeder.bus.follow("HR_STEP", STEP.at(run=feeder.run)):
        if isinstance(received.message, StepManifest) and received.message.step == 2:
            break
    kill(first)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-2"):
        for number in range(3, 5):
            await feeder.batch(number)
        await feeder.version(5)
    assert [feeder.hashes[number] for number in range(6)] == straight
    records = await feeder.steps()
    assert [r.step for r in records if isinstance(r, StepManifest)] == list(range(5)), "the manifest is not renewed"
    assert [r.step for r in records if isinstance(r, StepDone)] == list(range(5))


async def test_a_replaced_trainer_is_refused(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-old") as old:
        await feeder.version(0)
        async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-new"):
            await feeder.batch(0)
            await feeder.version(1)
            async for received in feeder.bus.follow("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer")):
                message = received.message
                if getattr(message, "kind", "") == "superseded":
                    assert message.id == "t-old"
                    break
            with pytest.raises(WrongSequence):
                await old._write((await feeder.steps())[0])
    assert [type(r).__name__ for r in await feeder.steps()] == ["StepManifest", "StepDone"]


async def test_a_batch_that_cannot_be_trained_on_fails_its_step_and_the_run_goes_on(
    connect: Connect, tmp_path: Path
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run):
        await feeder.batch(0, spoilt=True)
        await feeder.batch(1)
        await feeder.version(2)
    failed = [r for r in await feeder.steps() if isinstance(r, StepFailed)]
    assert [(r.step, r.reason, r.dropped_slots, r.version) for r in failed] == [(0, "bad_batch", 4, 1)]
    assert failed[0].command == f"headrace replay {feeder.folder} --step 0"
    assert feeder.hashes[1] == feeder.hashes[0] != feeder.hashes[2]


async def test_the_bound_is_what_the_closings_say_and_grows_with_what_is_kept(connect: Connect, tmp_path: Path) -> None:
    """1, then 3 from batch 2 on; killed while it grows; each token as old as its batch allows, and re-scored."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    first = Trainer(config(tmp_path), await connect("trainer"), feeder.run, "t-1")
    await first.start()
    await feeder.bound(1, 0)
    for number in range(2):
        await feeder.batch(number)
    await feeder.bound(3, 2)
    await feeder.batch(2)
    await feeder.batch(3, lag=2)
    await feeder.version(4)
    kill(first)
    async with living(Trainer, config(tmp_path), await connect("trainer"), feeder.run, "t-2"):
        await feeder.batch(4, lag=3)
        await feeder.batch(5, lag=4)
        await feeder.version(6)
    records = await feeder.steps()
    done = [r for r in records if isinstance(r, StepDone)]
    assert [(r.staleness_bound, r.staleness_max, r.max_abs_dlp) for r in done] == [
        (1, 0, 0.0), (1, 1, 0.0), (1, 1, 0.0), (2, 2, 0.0), (3, 3, 0.0)
    ]  # fmt: skip
    refused = [(r.step, r.reason) for r in records if isinstance(r, StepFailed)]
    assert refused == [(5, "cannot_rescore")], "what was too old to need is not kept"
    recorded = await of_run(await connect("replay"), config(tmp_path), feeder.folder, feeder.run)
    assert [replayed.bitwise_equal async for replayed in replay_steps(recorded, range(6))] == [True] * 6


COLLAPSING: dict[str, dict[str, Any]] = {
    "algorithm": {"learning_rate": 0.6, "warmup_steps": 12, "guard_k1": 0.3, "guard_patience": 1, "guard_backoff": 0.1},
    "trainer": {"checkpoint_every": 3},
}


@pytest.mark.slow
async def test_a_rollback_is_a_record_that_replays_and_survives_a_kill(connect: Connect, tmp_path: Path) -> None:
    """A policy that diverges from its samples: the guard rolls it back, and so does a replay, bit for bit."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    setting = config(tmp_path, **COLLAPSING)
    taken: StepFailed | None = None
    lives = number = 0
    while taken is None or number < taken.step + 4:
        lives += 1
        trainer = Trainer(setting, await connect("trainer"), feeder.run, f"t-{lives}")
        await trainer.start()
        for _ in range(4):
            assert number < 24, "it never collapsed"
            await feeder.batch(number)
            number += 1
            await feeder.version(number)
        kill(trainer)
        failed = [r for r in await feeder.steps() if isinstance(r, StepFailed)]
        taken = next((r for r in failed if r.reason == "collapse" and r.restored >= 0), None)
    assert taken.state_hash == feeder.hashes[taken.restored] == feeder.hashes[taken.version]
    assert f"back to version {taken.restored}" in taken.detail
    assert feeder.hashes[taken.version - 1] != taken.state_hash
    after = [r for r in failed if r.step > taken.step]
    assert [(r.step, r.reason, r.state_hash) for r in after[:1]] == [
        (taken.step + 1, "discarded_version", taken.state_hash)
    ]
    assert all(r.incarnation == 0 for r in await feeder.steps()), "a restart decides the same"
    recorded = await of_run(await connect("replay"), setting, feeder.folder, feeder.run)
    steps = range(taken.step - 1, taken.step + 3)
    assert [replayed.bitwise_equal async for replayed in replay_steps(recorded, steps)] == [True] * 4


async def test_an_exception_fails_the_step_and_its_version_may_still_be_rescored(
    connect: Connect, tmp_path: Path
) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    async with living(Raising, config(tmp_path), await connect("trainer"), feeder.run):
        for number in range(3):
            await feeder.batch(number)
        await feeder.version(3)
    records = await feeder.steps()
    assert [(r.step, r.reason, r.detail) for r in records if isinstance(r, StepFailed)] == [
        (1, "exception", "RuntimeError: out of luck")
    ]
    assert [(r.step, r.max_abs_dlp) for r in records if isinstance(r, StepDone)] == [(0, 0.0), (2, 0.0)]


class Foreign(Trainer):
    """As on a machine of other numerics: each step comes out a little different."""

    async def _compute(self, trainer: PolicyTrainer, manifest: StepManifest, *rest: Any) -> StepOutcome:
        result = await super()._compute(trainer, manifest, *rest)
        with torch.no_grad():
            next(iter(trainer.state.model.parameters())).mul_(1.0 + 1e-6)
        return result


async def test_other_bits_than_were_published_are_a_new_incarnation(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    rarely = config(tmp_path, trainer={"checkpoint_every": 50})
    first = Foreign(rarely, await connect("trainer"), feeder.run, "t-1")
    await first.start()
    for number in range(2):
        await feeder.batch(number)
    await feeder.version(2)
    kill(first)
    async with living(Trainer, rarely, await connect("trainer"), feeder.run, "t-2"):
        async for received in feeder.bus.follow("HR_EVENT", EVENT.where(run=feeder.run, type="snapshot_ready")):
            if received.message.version == 2 and received.message.state_hash != feeder.hashes[2]:
                break
    records = await feeder.steps()
    assert [(type(r).__name__, r.step, r.incarnation) for r in records[4:]] == [
        ("StepManifest", 0, 1),
        ("StepDone", 0, 1),
        ("StepManifest", 1, 1),
        ("StepDone", 1, 1),
    ]
    done = [r for r in records if isinstance(r, StepDone)]
    assert done[2].state_hash != done[0].state_hash
    renewed = [r for r in records if isinstance(r, StepManifest)][3]
    assert renewed.base_hash == done[2].state_hash


async def test_a_changed_recipe_does_not_rewrite_the_past(
    connect: Connect, tmp_path: Path, straight: list[str]
) -> None:
    """Killed before its first checkpoint, started with another learning rate: published steps stay as they are."""
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    rare: dict[str, dict[str, Any]] = {"trainer": {"checkpoint_every": 50}}
    first = Trainer(config(tmp_path, **rare), await connect("trainer"), feeder.run, "t-1")
    await first.start()
    for number in range(2):
        await feeder.batch(number)
    await feeder.version(2)
    kill(first)
    slower = config(tmp_path, **rare, algorithm={"learning_rate": 5e-3})
    async with living(Trainer, slower, await connect("trainer"), feeder.run, "t-2"):
        await feeder.batch(2)
        await feeder.version(3)
    assert [feeder.hashes[number] for number in range(3)] == straight[:3]
    assert feeder.hashes[3] != straight[3]
    assert all(record.incarnation == 0 for record in await feeder.steps())


async def test_records_that_are_not_to_be_replayed_are_purged(connect: Connect, tmp_path: Path) -> None:
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    changes: dict[str, dict[str, Any]] = {"replay": {"keep_steps": 1}}
    async with living(Trainer, config(tmp_path, **changes), await connect("trainer"), feeder.run):
        for number in range(6):
            await feeder.batch(number)
        await feeder.version(6)
        async for received in feeder.bus.follow("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer", type="event")):
            if received.message.kind == "purged" and received.message.data["messages"] == 2 * 2 * GROUP * PER_STEP:
                break
    manifests = [r for r in await feeder.steps() if isinstance(r, StepManifest)]
    for manifest in manifests:
        for trajectory, score in (slot for group in manifest.groups for slot in group.slots):
            if manifest.step < 2:  # version 6 keeps bound + 2 steps, and the first of them is replayed from version 2
                with pytest.raises(MessageGone):
                    await feeder.bus.get("HR_TRAJ", trajectory)
            else:
                assert (await feeder.bus.get("HR_TRAJ", trajectory)).message.group
                assert (await feeder.bus.get("HR_SCORE", score)).message.group
    told = [r.message async for r in feeder.bus.history("HR_STEP", STEP.at(run=feeder.run))]
    kept = [slot for manifest in manifests if manifest.step >= 2 for group in manifest.groups for slot in group.slots]
    assert [record for record in told if isinstance(record, RecordsPurged)][-1] == RecordsPurged(
        run=feeder.run, step=2, trajectory_seq=min(kept)[0], score_seq=min(score for _, score in kept)
    ), "the audit knows what is missing"
    closings = [r async for r in feeder.bus.history("HR_SCORE", CLOSE.where(run=feeder.run))]
    assert len(closings) == 12, "closings are kept"
    names = sorted(path.name for path in (feeder.folder / "checkpoints").glob("v*"))
    assert names == ["v00000002.safetensors", "v00000004.safetensors", "v00000006.safetensors"]
