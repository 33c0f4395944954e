"""Every figure of a step's efficiency, also of a step that failed, is in the report, on its page, in the metrics and in
the exporters."""

import re
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace.config import Config
from headrace.dashboard import page
from headrace.dashboard.efficiency import of_run
from headrace.dashboard.exporters.figures import figures
from headrace.dashboard.run_metrics import RunMetrics
from headrace.dashboard.watch import Watch
from headrace.messages.training import Efficiency, StepDone, StepFailed
from headrace.training.figures.clock import CAUSES
from tests.conftest import Connect
from tests.support import records

pytestmark = pytest.mark.anyio

SECONDS: dict[str, float] = {cause: 0.5 + number for number, cause in enumerate(CAUSES)}
"""Different ones, so that no two causes can be confused; their sum is 32."""
TAKEN = Efficiency(
    seconds=SECONDS,
    wall_s=32.0,
    trained_tokens=6400,
    forwarded_tokens=9600,
    model_flops=8e12,
    hardware_flops=16e12,
    peak_flops=1e12,
    between_s=0.25,
    expert_load=1.75,
    collectives_s=(3.0, 1.0),
    peak_bytes=3000,
    planned_bytes=2000,
)
LOST = Efficiency(seconds={"busy": 3.0, "batch": 1.0}, wall_s=4.0)
NAMES = {
    "headrace_trained_tokens_per_second": "trained_tokens_per_s",
    "headrace_forwarded_tokens_per_second": "forwarded_tokens_per_s",
    "headrace_expert_load_ratio": "expert_load",
    "headrace_mfu_ratio": "mfu",
    "headrace_hfu_ratio": "hfu",
    "headrace_trainer_peak_bytes": "peak_bytes",
    "headrace_trainer_planned_bytes": "planned_bytes",
    "headrace_rank_collectives_seconds": "longest_collectives_s",
    "headrace_rank_straggler_seconds": "longest_straggler_s",
}
"""Metric to figure. `peak_to_plan` is a ratio of two of them."""


def done(step: int) -> StepDone:
    return msgspec.structs.replace(records.done(step, [], 2), efficiency=TAKEN)


def failed(step: int) -> StepFailed:
    return msgspec.structs.replace(records.step_failed(step, [], 2), efficiency=LOST)


async def watched(connect: Connect, taken: list[StepDone], lost: list[StepFailed]) -> Watch:
    watch = Watch(await connect("operator"), f"r{token_hex(4)}", Config(), started=1.0)
    watch.steps, watch.failed_steps = taken, lost
    return watch


def scraped(watch: Watch) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """What Prometheus reads: figures by name, the newest step's seconds by cause, and those of all steps."""
    samples = [sample for metric in RunMetrics(watch, watch.bus, Path()).collect() for sample in metric.samples]
    newest = {s.labels["cause"]: s.value for s in samples if s.name == "headrace_step_cause_seconds"}
    every = {s.labels["cause"]: s.value for s in samples if s.name == "headrace_trainer_cause_seconds_total"}
    return {NAMES[s.name]: s.value for s in samples if s.name in NAMES}, newest, every


async def test_every_figure_of_a_step_is_on_the_page_in_the_metrics_and_in_the_exporters(connect: Connect) -> None:
    want = TAKEN.figures()
    assert set(want) == {*NAMES.values(), "peak_to_plan", *(f"{cause}_s" for cause in CAUSES)}
    assert (want["mfu"], want["hfu"], want["expert_load"], want["trained_tokens_per_s"]) == (0.25, 0.5, 1.75, 200.0)
    watch = await watched(connect, [done(0)], [])
    told, newest, every = scraped(watch)
    assert told == {name: want[name] for name in NAMES.values()}
    assert newest == every == SECONDS
    logged = figures(watch.steps[0], 1)
    assert (
        logged is not None
        and {f"efficiency/{name}": value for name, value in want.items()}.items() <= logged[1].items()
    )
    drawn = page.details(watch)
    missing = [name for name in want if name != "peak_to_plan" and not re.search(rf"\b{name}\b", drawn)]
    assert not missing, f"not on the page: {missing}"


async def test_a_failed_step_is_part_of_the_time_by_cause(connect: Connect) -> None:
    watch = await watched(connect, [done(0)], [failed(1)])
    _, newest, every = scraped(watch)
    assert newest == LOST.seconds, "the newest step is the failed one"
    assert every == SECONDS | {cause: SECONDS[cause] + LOST.seconds[cause] for cause in ("busy", "batch")}
    logged = figures(watch.failed_steps[0], 1)
    assert logged is not None and (logged[0], logged[1]["efficiency/busy_s"]) == (1, 3.0)
    run = of_run(watch.steps, watch.failed_steps)
    assert run is not None
    assert (run.wall_s, run.failed_s, run.seconds) == (36.0, 4.0, every)
    assert (run.mfu, run.hfu, run.expert_load) == (8 / 36, 16 / 36, 1.75)
    assert (run.trained_tokens_per_s, run.forwarded_tokens_per_s) == (round(6400 / 36, 3), round(9600 / 36, 3))


async def test_a_run_whose_every_step_failed_shows_where_its_time_went(connect: Connect) -> None:
    watch = await watched(connect, [], [failed(0)])
    assert scraped(watch)[1] == LOST.seconds
    assert "Seconds of a step by cause" in page.details(watch)
    assert of_run([], []) is None
    earlier = records.step_failed(0, [], 2)
    assert of_run([], [earlier]) is None, "an earlier headrace did not measure it"
