"""Mid-training in the trainer's process: from the sources of a configuration to version 0."""

import asyncio
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace import registry
from headrace.actors.trainer import initial_policy
from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.payloads import renderer_bundles
from headrace.bus.runtime.plugins import key_of
from headrace.config import Config
from headrace.config.training import Data
from headrace.dashboard.report import held_out_of
from headrace.dashboard.watch import Watch
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepDone
from headrace.rendering.tokenizer import Tokenizer
from headrace.training import mid_training
from headrace.training.data import registry as readers
from tests.actors.trainer.test_ranks import event, supervised
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import RunFeeder, config, new_run

pytestmark = pytest.mark.anyio


async def test_version_0_is_mid_trained_and_its_tokenizer_kept(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "extension"))
    registry.admit("readers", ["acme.readers:Pairs"])
    (tmp_path / "own.pairs").write_text('{"question": "1 + 1 is", "answer": "2"}\n' * 3)
    lines = [json.dumps({"text": f"def f{number}(): return {number}"}) for number in range(40)]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    data = (
        Data(kind="generated"),
        Data(kind="text", path=str(tmp_path / "code.jsonl")),
        Data(kind="acme.readers:Pairs", path=str(tmp_path / "own.pairs")),
    )
    changes: dict[str, dict[str, Any]] = {
        "mid_training": {"tokens": 4000, "batch_tokens": 512, "data": data, "held_out": 0.2},
        "policy": {"vocab": 420},
    }
    setting = config(tmp_path, **changes)
    admin = await connect()
    async with living(Trainer, setting, await connect("trainer"), run):
        async for received in admin.follow("HR_EVENT", EVENT.where(run=run, type="snapshot_ready")):
            assert received.message.version == 0
            break
    text = (tmp_path / run / "tokenizer.json").read_text()
    assert len(Tokenizer.parse(text)) <= 420
    bundle = initial_policy.bundle(setting, tmp_path / run)
    assert bundle.tokenizer_json == text and bundle.renderer == "terse"
    assert await renderer_bundles.fetch(admin, run) == bundle
    (used,) = readers.plugins_of(data)
    agreed = await (await admin.kv("HR_PLUGINS")).get(key_of("trainer", run, used))
    assert agreed is not None and agreed[0] == used, "another source of the reader is refused"
    phases = [r.message.text async for r in admin.history("HR_EVENT", EVENT.where(run=run, type="event"))]
    assert "mid-training" in phases
    first, last = (json.loads(line) for line in (tmp_path / run / "mid-training.jsonl").read_text().splitlines())
    assert (first["step"], first["loss"]) == (0, None) and last["tokens"] >= 4000
    watch = Watch(admin, run, setting, started=0.0)
    watch.events = [
        (0.0, r.message)
        async for r in admin.history("HR_EVENT", EVENT.where(run=run, type="event"))
        if isinstance(r.message, Event)
    ]
    (losses,) = [loss for source, loss in held_out_of(watch).items() if source == "1:text"]
    assert (losses.before, losses.after) == (first["held_out"]["1:text"], last["held_out"]["1:text"])
    assert losses.before is not None and 0.0 < losses.after < losses.before


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_of_two_ranks_is_mid_trained_over_them_also_after_one_was_killed(
    connect: Connect, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the first rank did it alone, with all weights on its device."""
    monkeypatch.setattr(mid_training, "KEEP_S", 0.0)
    monkeypatch.setattr(mid_training, "KEEP_SHARE", math.inf)
    monkeypatch.setattr(mid_training, "REPORT_S", 0.0)

    def setting(folder: Path, ranks: int) -> Config:
        learning = {"tokens": 20_000, "batch_tokens": 512, "processes": 2}
        return config(folder, mid_training=learning, trainer={"ranks": ranks, "micro_tokens": 4096})

    (tmp_path / "one").mkdir()
    one = RunFeeder(await connect(), new_run(), tmp_path / "one")
    async with living(Trainer, setting(tmp_path / "one", 1), await connect("trainer"), one.run):
        want = (await one.version(0)).state_hash
    feeder = RunFeeder(await connect(), new_run(), tmp_path)
    checkpoint_file = tmp_path / feeder.run / "checkpoints" / "mid-training.safetensors"
    async with supervised(setting(tmp_path, 2), server, feeder.run):
        async with asyncio.timeout(PATIENCE_S):
            while not checkpoint_file.exists():
                await asyncio.sleep(0.01)
        (victim,) = ranks_of()
        os.kill(victim, signal.SIGKILL)
        told = await event(feeder, "actor_failed")
        assert "the trainer was not prepared" in told and f"rank 1 (process {victim}) was killed by SIGKILL" in told
        await feeder.batch(0)
        await feeder.version(1)
        assert not checkpoint_file.exists()
    assert feeder.hashes[0] == want, "version 0 of one process"
    (done,) = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    assert done.exact and done.max_abs_dlp == 0.0 and done.rescored_tokens and feeder.hashes[1] != want
    measured = done.efficiency
    assert measured is not None and measured.wall_s == pytest.approx(sum(measured.seconds.values()), rel=1e-6)
