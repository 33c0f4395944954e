"""A trainer that can never train ends the run at once, with its reason."""

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.trainer.actor import Trainer
from headrace.bus.errors import Unrecoverable
from headrace.training import memory_plan
from tests.conftest import Connect
from tests.support.recorded_run import config, new_run

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
