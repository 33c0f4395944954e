"""`headrace tasks patches`: writes the changes of a run's attempts as git patches, one row per attempt."""

import argparse
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_plugins, add_run
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
    add_plugins(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Write the file; 1 if no trajectory of the run is stored."""
    from headrace.launch.session import looped

    return looped(write(args))


async def write(args: argparse.Namespace) -> int:
    """Run the command on the event loop."""
    from headrace.cli.tasks.attempts import attempts
    from headrace.config import load
    from headrace.launch import runs
    from headrace.launch.session import bus_of
    from headrace.tasks import UnknownSuite
    from headrace.tasks.exporting.patches import patch

    folder = runs.find(args.run)
    count = 0
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_of(folder, "judge"))
        file = stack.enter_context(args.file.open("w", encoding="utf-8"))
        try:
            async for attempt in attempts(bus, folder.id, load(folder.config).tasks.dir):
                name = attempt.made.task.task
                try:
                    text, left_out = patch(attempt.task, attempt.made)
                except ValueError as error:
                    raise RunError(f"{name}: {error}") from None
                row = {
                    "instance_id": name,
                    "model_name_or_path": attempt.policy,
                    "model_patch": text.decode("utf-8", "surrogateescape"),
                    "attempt": attempt.made.id,
                    "left_out": left_out,
                }
                file.write(json.dumps(row) + "\n")
                count += 1
        except UnknownSuite as error:
            raise RunError(str(error)) from None
    say(f"{count} patches in {args.file}")
    return 0 if count else 1
