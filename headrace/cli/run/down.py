"""`headrace down`: end all processes of a run, first by request and then by force."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run, number

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("down", help="end the active run and every process of it")
    add_run(parser)
    parser.add_argument("--dir", default="runs", help="folder of the runs; default: runs")
    parser.add_argument(
        "--drain",
        type=number(0),
        default=10.0,
        metavar="SECONDS",
        help="time that processes get to end by themselves; default: 10",
    )
    parser.set_defaults(handler=down)


def down(args: argparse.Namespace) -> int:
    """End the run; 1 when a process is left that could not be ended."""
    from headrace.launch import runs
    from headrace.launch.output import say
    from headrace.launch.supervision.down import down as end

    root = Path(args.dir)
    folder = runs.find(args.run, root)
    ended = end(root, folder.path, args.drain)
    text = f"run {folder.id}: {ended.how}"
    if ended.leftovers:
        text += f"; {ended.leftovers} left-over processes were killed"
    say(f"{text}; {ended.remaining or 'no'} processes are left")
    return 1 if ended.remaining else 0
