"""Mid-training in the trainer's process: from the sources of a configuration to version 0."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.trainer import initial_policy
from headrace.actors.trainer.actor import Trainer
from headrace.bus.payloads import renderer_bundles
from headrace.bus.runtime.plugins import key_of
from headrace.config.training import Data
from headrace.dashboard.report import held_out_of
from headrace.dashboard.watch import Watch
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT
from headrace.rendering.tokenizer import Tokenizer
from headrace.training.data import registry as readers
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.paths import ROOT
from tests.support.recorded_run import config, new_run

pytestmark = pytest.mark.anyio


async def test_version_0_is_mid_trained_and_its_tokenizer_kept(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "extension"))
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
    agreed = await (await admin.kv("HR_STATE")).get(key_of(run, used))
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
