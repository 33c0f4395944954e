"""A trainer that can never train ends the run at once, and a step that fails tells its reason and its time."""

import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.errors import Unrecoverable
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepDone, StepFailed
from headrace.training import memory_plan
from headrace.training.figures.clock import CAUSES
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.raising_trainer import Raising
from tests.support.recorded_run import RunFeeder, config, new_run

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("section", "sentence"),
    [({"frozen": ("nothing.*",)}, r"\[trainer\] frozen: "), ({"micro_tokens": 2**31 - 1}, "GiB and its device has")],
)
async def test_a_trainer_that_can_never_train_is_not_tried_again(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setattr(memory_plan, "FREED_S", 0.0)
    trainer = Trainer(config(tmp_path, trainer=section), await connect("trainer"), new_run(), "t-1")
    await trainer.start()
    try:
        failure = await trainer.failed
    finally:
        await trainer.shut(1.0)
    assert isinstance(failure, Unrecoverable) and re.search(sentence, str(failure)), failure


async def test_a_failed_step_says_where_its_time_went_and_that_nothing_was_trained(
    connect: Connect, tmp_path: Path
) -> None:
    feeder, began = RunFeeder(await connect(), new_run(), tmp_path), time.perf_counter()
    setting = config(tmp_path)
    setting = msgspec.structs.replace(setting, trainer=msgspec.structs.replace(setting.trainer, peak_tflops=0.0))
    async with living(Raising, setting, await connect("trainer"), feeder.run):
        await feeder.batch(0, spoilt=True)
        await feeder.batch(1)
        await feeder.batch(2)
        await feeder.version(3)
    elapsed = time.perf_counter() - began
    outcomes = [record for record in await feeder.steps() if isinstance(record, StepDone | StepFailed)]
    reasons = [outcome.reason if isinstance(outcome, StepFailed) else "" for outcome in outcomes]
    assert reasons == ["bad_batch", "exception", ""]
    told = [outcome.efficiency for outcome in outcomes if outcome.efficiency is not None]
    assert len(told) == 3
    for each in told:
        assert sum(each.seconds.values()) == pytest.approx(each.wall_s, rel=1e-6) and set(each.seconds) == set(CAUSES)
        assert each.seconds["batch"] > 0.0 and each.seconds["records"] > 0.0
    assert sum(each.wall_s for each in told) < elapsed, "no moment counts in two steps"
    for each in told[:2]:
        assert (each.trained_tokens, each.forwarded_tokens, each.model_flops, each.hardware_flops) == (0, 0, 0.0, 0.0)
    assert told[2].trained_tokens > 0 and told[2].hardware_flops > told[2].model_flops > 0.0
    events = [r.message async for r in feeder.bus.history("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer"))]
    unknown = [event.text for event in events if getattr(event, "kind", "") == "peak_unknown"]
    assert len(unknown) == 1 and "[trainer] peak_tflops" in unknown[0], "said once, not at every step"
