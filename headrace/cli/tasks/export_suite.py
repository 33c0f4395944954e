"""`headrace tasks export`: writes tasks of a suite as Harbor folders."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("export", help="write tasks of a suite as Harbor folders")
    parser.add_argument("suite")
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder to write; must be new or empty")
    parser.add_argument("--tasks", type=integer(1), default=100, help="number of tasks, from the first")
    parser.add_argument("--organisation", default="headrace", help="first part of every task's name; default: headrace")
    add_config(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Write the folders; 1 when no task could be written."""
    from headrace.launch import admission
    from headrace.tasks import open_suite
    from headrace.tasks.base import UnknownSuite
    from headrace.tasks.exporting.harbor import export

    if args.dir.exists() and any(args.dir.iterdir()):
        raise RunError(f"{args.dir} is not empty; name a new folder")
    try:
        suite = open_suite(admission.suite(args.suite), admission.own(args.config, args.set).tasks.dir)
        done = export(suite, suite.ids()[: args.tasks], args.dir, args.organisation)
    except UnknownSuite as error:
        raise RunError(str(error)) from None
    for id, reason in list(done.refused.items())[:10]:
        say(f"refused {id}: {reason}")
    say(f"{done.tasks} tasks in {args.dir}, {len(done.refused)} refused")
    return 0 if done.tasks else 1
