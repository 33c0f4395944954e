"""Writers for TensorBoard, Weights & Biases and MLflow, each an optional extra of the package.

A run keeps one identity in each of them: the run's id. So a run that is resumed continues its curves.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.bus.errors import BusError
from headrace.config import Metrics


class Writer(Protocol):
    """A target of figures. Calls block."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of one step."""

    def close(self) -> None:
        """Write pending figures."""


class TensorBoard:
    """Event files in <folder>/<run>, for `tensorboard --logdir <folder>`."""

    def __init__(self, folder: str, run: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(Path(folder) / run))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One event with a scalar per figure."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a project; offline unless WANDB_MODE says otherwise, for `wandb sync` later."""

    def __init__(self, project: str, run: str, folder: Path) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(console="off", silent=True)
        self._run: Any = wandb.init(
            project=project, id=run, name=run, resume="allow", mode=mode, dir=str(folder), settings=settings
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures under their own step counter: an evaluation may come after a step's log."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of the experiment `headrace`; found again by its tag."""

    def __init__(self, address: str, run: str) -> None:
        import mlflow
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            self._client: Any = MlflowClient(address)
        except MlflowException as error:
            raise BusError(f"[metrics] mlflow = {address!r} cannot be used: {str(error).splitlines()[0]}") from None
        self._metric = mlflow.entities.Metric
        experiment = self._client.get_experiment_by_name("headrace")
        id = experiment.experiment_id if experiment else self._client.create_experiment("headrace")
        earlier = self._client.search_runs([id], f"tags.`headrace.run` = '{run}'", max_results=1)
        made = earlier[0] if earlier else self._client.create_run(id, run_name=run, tags={"headrace.run": run})
        self._id = made.info.run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the figures in one request."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def wanted(section: Metrics) -> dict[str, str]:
    """Exporter to its target, for those that [metrics] turns on."""
    named = {"tensorboard": section.tensorboard, "wandb": section.wandb, "mlflow": section.mlflow}
    return {name: target for name, target in named.items() if target}


def open_writer(name: str, target: str, run: str, folder: Path) -> Writer:
    """The writer of an exporter. BusError when its package is missing or its target cannot be used."""
    makers: dict[str, Callable[[], Writer]] = {
        "tensorboard": lambda: TensorBoard(target, run),
        "wandb": lambda: WeightsAndBiases(target, run, folder),
        "mlflow": lambda: MLflow(target, run),
    }
    try:
        return makers[name]()
    except ImportError as error:
        raise BusError(
            f"[metrics] {name} is set, but {error.name} is not installed: pip install 'headrace[{name}]'"
        ) from None
