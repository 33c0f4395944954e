"""Phases of a run as they are observed, also of one that is resumed with more steps."""

import time
from typing import cast

import pytest

from headrace.bus.connection import Bus
from headrace.config import Config, Curriculum
from headrace.dashboard.watch import GAUGE_S, Watch
from headrace.messages.operations import LAST_PHASE, LEARNING, Event, Metric


def observed(watch: Watch, *phases: tuple[str, int | None]) -> None:
    for text, steps in phases:
        data: dict[str, str | int | float | bool] = {} if steps is None else {"steps": steps}
        watch.on_event(Event(actor="curriculum", id="c", kind="phase", text=text, data=data), time.time(), print)


def test_a_run_that_is_resumed_with_more_steps_trains_again() -> None:
    watch = Watch(cast(Bus, None), "r1", Config(curriculum=Curriculum(steps=25)), started=0.0)
    first = (("mid-training", None), (LEARNING, 0), (LAST_PHASE, None))
    observed(watch, *first)
    assert watch.phase == LAST_PHASE
    began = watch.phase_started[LEARNING]
    observed(watch, (LEARNING, 20))
    assert watch.phase == LEARNING
    assert watch.phase_started == {"mid-training": watch.phase_started["mid-training"], LEARNING: began}
    observed(watch, (LAST_PHASE, None))
    assert watch.phase == LAST_PHASE and watch.phase_started[LAST_PHASE] >= began


def test_a_curriculum_that_starts_again_in_the_final_evaluation_does_not_train_again() -> None:
    watch = Watch(cast(Bus, None), "r1", Config(curriculum=Curriculum(steps=20)), started=0.0)
    observed(watch, (LEARNING, 0), (LAST_PHASE, None))
    ended = dict(watch.phase_started)
    observed(watch, (LEARNING, 20), (LAST_PHASE, None))
    assert watch.phase == LAST_PHASE and watch.phase_started == ended


@pytest.mark.anyio
async def test_figures_of_a_killed_actor_count_in_sums_and_not_in_what_is_so_now() -> None:
    watch = Watch(cast(Bus, None), "r1", Config(), started=0.0)

    async def measure(id: str, vms: float, clones: float) -> None:
        values = {"vms": vms, "clones": clones}
        await watch.on_status(Metric(actor="environment", id=id, run="r1", time=0.0, values=values))

    await measure("environment-1", 10.0, 30.0)
    await measure("far", 2.0, 4.0)
    assert (watch.gauge("environment", "vms"), watch.metric("environment", "clones")) == (12.0, 34.0)
    watch.measured["environment:environment-1"] -= GAUGE_S
    await measure("environment-7", 5.0, 5.0)
    assert (watch.gauge("environment", "vms"), watch.metric("environment", "clones")) == (7.0, 39.0)
    assert watch.gauge("trainer", "mid_training_tokens") == 0.0
