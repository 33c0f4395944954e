"""`headrace tasks patches`: writes the changes of a run's attempts as git patches, one row per attempt."""

import argparse
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    text = "write the changes of a run's attempts as git patches, in the form of SWE-bench's predictions"
    parser = commands.add_parser("patches", help=text)
    add_run(parser, optional=False)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Write the file; 1 if no trajectory of the run is stored."""
    from headrace.launch.session import looped

    return looped(write(args))


async def write(args: argparse.Namespace) -> int:
    """Run the command on the event loop."""
    from headrace.config import load
    from headrace.launch import runs
    from headrace.launch.session import bus_of
    from headrace.messages.rollout import Trajectory
    from headrace.messages.subjects import TRAJ
    from headrace.tasks import UnknownSuite, open_suite
    from headrace.tasks.exporting.patches import patch

    folder = runs.find(args.run)
    config = load(folder.config)
    count = 0
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_of(folder, "judge"))
        file = stack.enter_context(args.file.open("w", encoding="utf-8"))
        async for received in bus.history("HR_TRAJ", TRAJ.at(run=folder.id, group="any").removesuffix("any") + "*"):
            made = received.message
            if not isinstance(made, Trajectory) or made.lane == "production":
                continue
            try:
                text, left_out = patch(open_suite(made.task.suite, config.tasks.dir).task(made.task.task), made)
            except (UnknownSuite, ValueError) as error:
                raise RunError(f"{made.task.task}: {error}") from None
            row = {
                "instance_id": made.task.task,
                "model_name_or_path": f"{made.policy.kind}:{made.policy.name or made.policy.version}",
                "model_patch": text.decode("utf-8", "surrogateescape"),
                "attempt": made.id,
                "left_out": left_out,
            }
            file.write(json.dumps(row) + "\n")
            count += 1
    say(f"{count} patches in {args.file}")
    return 0 if count else 1
