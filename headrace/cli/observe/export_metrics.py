"""`headrace export-metrics`: write a run's figures to TensorBoard, Weights & Biases or MLflow while it runs."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run, add_set

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export-metrics", help="follow a run and write its figures to the targets that [metrics] names"
    )
    add_run(parser)
    add_set(parser)
    parser.set_defaults(handler=export_metrics)


def export_metrics(args: argparse.Namespace) -> int:
    """Follow the run to its end."""
    from headrace.config import ConfigError, load
    from headrace.dashboard.exporters.follow import follow
    from headrace.dashboard.exporters.writers import open_writer, wanted
    from headrace.launch import runs
    from headrace.launch.session import looped, run_of

    run_folder = runs.find(args.run)
    targets = wanted(load(run_folder.config, args.set).metrics)
    if not targets:
        raise ConfigError("[metrics] names no target: set tensorboard, wandb or mlflow")
    folder = run_folder.path / "exporters"
    folder.mkdir(exist_ok=True)

    async def body() -> int:
        async with run_of(str(run_folder.path), role="dashboard") as run:
            writers = {name: open_writer(name, target, run.id, folder) for name, target in targets.items()}
            try:
                await follow(run.bus, run.id, writers, folder / "position.json")
            finally:
                for writer in writers.values():
                    writer.close()
        return 0

    return looped(body())
