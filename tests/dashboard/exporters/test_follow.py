"""Exporters write every step and evaluation once, also when they are started again, and say what is missing."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Config, Metrics
from headrace.dashboard.exporters import writers
from headrace.dashboard.exporters.figures import figures
from headrace.dashboard.exporters.follow import follow
from headrace.dashboard.run_metrics import RunMetrics
from headrace.dashboard.watch import FINISHED, Watch
from headrace.messages import subjects as s
from headrace.messages.evaluation import EvalResult
from headrace.messages.operations import Event
from headrace.messages.training import Behaviour, Efficiency, StepDone
from tests.conftest import Connect
from tests.support.records import of

pytestmark = pytest.mark.anyio


def step(run: str, number: int, reward: float = 0.5) -> StepDone:
    return of(
        StepDone,
        run=run,
        step=number,
        version=number + 1,
        reward_mean=reward,
        behaviour=Behaviour(calls_per_turn=1.5, reads_before_edit=2.0, tested=0.5, lint_fixed=0.0, asked=0.25),
        efficiency=Efficiency(seconds={"busy": 3.0, "batch": 1.0}, wall_s=4.0, trained_tokens=100, model_flops=8.0),
    )


async def publish(bus: Bus, run: str, numbers: range, finish: bool) -> None:
    for number in numbers:
        await bus.publish(s.STEP.at(run=run), step(run, number, number / 10))
    if finish:
        done = of(
            EvalResult, id="e1", run=run, suite="s", version=3, tasks=4, passed=1, rate=0.25, reason="heldout_after_t1"
        )
        await bus.publish(s.EVENT.at(run=run, actor="evaluator", type="eval_result"), done)
    end = Event(actor="curriculum", id="c", run=run, kind=FINISHED)
    await bus.publish(s.EVENT.at(run=run, actor="curriculum", type="event"), end)


class Recorder:
    """Keeps what it is given, as a file would."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []

    def write(self, number: int, values: Mapping[str, float]) -> None:
        self.written.append((number, dict(values)))

    def close(self) -> None:
        pass


async def test_every_record_is_written_once_over_two_starts(connect: Connect, tmp_path: Path) -> None:
    bus, run = await connect(), f"r{token_hex(4)}"
    first, second, state = Recorder(), Recorder(), tmp_path / "position.json"
    await publish(bus, run, range(2), finish=False)
    await follow(await connect("dashboard"), run, {"r": first}, state)
    await publish(bus, run, range(2, 4), finish=True)
    await follow(await connect("dashboard"), run, {"r": second}, state)
    assert [number for number, values in first.written if "train/reward_mean" in values] == [0, 1]
    assert [number for number, values in second.written if "train/reward_mean" in values] == [2, 3]
    assert [values for _, values in second.written if "eval/heldout_after_t1/rate" in values]


def test_values_that_are_not_finite_are_left_out() -> None:
    logged = figures(step("r1", 3), 4)
    assert logged is not None and logged[0] == 3
    assert "train/max_abs_dlp" not in logged[1] and logged[1]["train/staleness_bound"] == 1.0
    assert (logged[1]["efficiency/trained_tokens_per_s"], logged[1]["efficiency/busy_s"]) == (25.0, 3.0)
    assert "efficiency/mfu" not in logged[1], "no peak is known"
    assert (logged[1]["behaviour/calls_per_turn"], logged[1]["behaviour/asked"]) == (1.5, 0.25)


async def test_a_figure_of_the_loss_reaches_every_exporter_by_its_name(connect: Connect, tmp_path: Path) -> None:
    done = msgspec.structs.replace(step("r1", 3), metrics={"ratio": 1.25, "gone": math.nan})
    logged = figures(done, 4)
    assert logged is not None
    assert {name: value for name, value in logged[1].items() if name.startswith("loss/")} == {"loss/ratio": 1.25}
    bus = await connect("dashboard")
    watch = Watch(bus, "r1", Config(), 0.0)
    watch.steps.append(done)
    found = {
        sample.labels["metric"]: sample.value
        for family in RunMetrics(watch, bus, tmp_path).collect()
        for sample in family.samples
        if sample.name == "headrace_loss_metric"
    }
    assert found["ratio"] == 1.25


def test_evaluations_while_training_goes_on_are_a_curve_over_versions() -> None:
    result = of(
        EvalResult,
        id="step-4-generated-dev",
        run="r1",
        suite="generated/dev",
        version=5,
        tasks=4,
        passed=1,
        rate=0.25,
        reason="during_generated/dev",
    )
    assert figures(result, 9) == (5, {"eval/generated/dev/rate": 0.25, "eval/generated/dev/infra_failures": 0.0})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(BusError, match=r"pip install 'headrace\[tensorboard\]'"):
        writers.open_writer("tensorboard", str(tmp_path), "r1", tmp_path)


def test_nothing_is_exported_unless_asked() -> None:
    assert writers.wanted(Metrics()) == {}
    assert writers.wanted(Metrics(wandb="project")) == {"wandb": "project"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_the_real_program_stores_what_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name, reason=f"pip install 'headrace[{name}]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    target = {"tensorboard": str(tmp_path / "tb"), "wandb": "headrace", "mlflow": f"file://{tmp_path}/ml"}[name]
    for number in range(2):  # opened twice: the second continues the run of the first
        writer = writers.open_writer(name, target, "r1", tmp_path)
        writer.write(number, {"train/reward_mean": 0.5 + number})
        writer.close()
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(tmp_path / "tb" / "r1"))
        read.Reload()
        assert [(e.step, e.value) for e in read.Scalars("train/reward_mean")] == [(0, 0.5), (1, 1.5)]
    elif name == "mlflow":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(target)
        experiment = client.get_experiment_by_name("headrace")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        assert len(runs) == 1
        history = client.get_metric_history(runs[0].info.run_id, "train/reward_mean")
        assert [(e.step, e.value) for e in history] == [(0, 0.5), (1, 1.5)]
    else:
        stored = b"".join(path.read_bytes() for path in tmp_path.rglob("run-r1.wandb"))
        assert stored.count(b"train/reward_mean") >= 2
