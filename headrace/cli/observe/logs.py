"""`headrace logs`: prints the merged logs of all processes of a run, filtered by actor, trace and level."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("logs", help="show the logs of a run, of one actor or of one trace")
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until interrupted")
    parser.add_argument("--actor", default="", metavar="NAME", help="only this actor, process or actor id")
    parser.add_argument("--trace", default="", metavar="ID", help="only lines of this trace (its first digits suffice)")
    parser.add_argument(
        "--level", default="", choices=("debug", "info", "warning", "error"), help="only lines of this level and above"
    )
    parser.set_defaults(handler=logs)


def logs(args: argparse.Namespace) -> int:
    """Print the lines that pass the filters."""
    from headrace.launch import logs as reading
    from headrace.launch import runs
    from headrace.launch.output import say

    folder = runs.find(args.run)
    if not folder.logs.is_dir():
        raise runs.RunError(f"{folder.path} has no logs: its actors were started elsewhere, see their own output")
    wanted = reading.Wanted(args.actor, args.trace, args.level)
    reading.follow(folder.logs, wanted, say, ends=lambda: not args.follow)
    return 0
