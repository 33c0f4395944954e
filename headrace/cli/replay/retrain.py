"""`headrace retrain`: train a second policy on a run's recorded batches, with another objective or scores."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_changes, add_plugins, add_run, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.messages.training import StepManifest
    from headrace.replay.recorded_run import RecordedRun


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("retrain", help="train a second policy on a run's recorded batches")
    add_run(parser, optional=False)
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="folder of the second policy; training resumes where it stopped"
    )
    add_changes(parser, "use another objective")
    parser.add_argument("--judge", default="", metavar="VERSION", help="learn from the scores that `rejudge` wrote")
    parser.add_argument("--steps", type=integer(0), default=0, help="number of steps; 0 means all")
    parser.add_argument("--follow", action="store_true", help="follow an active run")
    add_plugins(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Train; print a JSON line per step and leave the weights in the folder."""
    from headrace.launch.session import looped

    return looped(retrain(args))


async def retrain(args: argparse.Namespace) -> int:
    """Run the command on the event loop."""
    from headrace.config import load
    from headrace.launch import runs
    from headrace.launch.admission import changes
    from headrace.launch.session import bus_of
    from headrace.replay import recorded_run
    from headrace.replay import rejudge as rejudging
    from headrace.replay.objective import other
    from headrace.replay.recorded_run import ReplayError
    from headrace.replay.retrain import SecondTrainer
    from headrace.training.checkpoint import UnusableCheckpoint
    from headrace.training.device import TrainerError

    folder = runs.find(args.run)
    run_config = load(folder.config)
    changes(args.changes)
    try:
        config = other(run_config, args.changes)[0] if args.changes else run_config
        async with bus_of(folder, "replay") as bus:
            run = await recorded_run.of_run(bus, run_config, folder.path, folder.id)
            judging: asyncio.Task[None] | None = None
            if args.judge and args.follow:
                live = rejudging.LiveScores()
                judging = asyncio.create_task(live.follow(bus, folder.id, args.judge))
                second = SecondTrainer(run, config, Path(args.to), live.found, live.more)
            else:
                scores = await rejudging.scores_of(bus, folder.id, args.judge) if args.judge else None
                second = SecondTrainer(run, config, Path(args.to), scores)
            source = follow(bus, folder.id) if args.follow else recorded(run)
            try:
                async for line in second.steps(source, args.steps):
                    say(msgspec.json.encode(line).decode())
            finally:
                if judging is not None:
                    judging.cancel()
    except (ReplayError, TrainerError, UnusableCheckpoint) as error:
        raise RunError(str(error), 1) from None
    return 0


async def recorded(run: "RecordedRun") -> "AsyncIterator[StepManifest]":
    """The recorded batches, in order."""
    for step in sorted(run.manifests):
        yield run.manifests[step]


async def follow(bus: "Bus", run: str) -> "AsyncIterator[StepManifest]":
    """The recorded batches, then every new one, without end. Of several incarnations of a step the first counts."""
    from headrace.messages import subjects
    from headrace.messages.training import StepManifest

    seen = -1
    async for received in bus.follow("HR_STEP", subjects.STEP.at(run=run)):
        if isinstance(manifest := received.message, StepManifest) and manifest.step > seen:
            seen = manifest.step
            yield manifest
