"""`headrace up`: start a whole run on this machine and follow it to its report."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("up", help="start a whole run on this machine and follow it to its end")
    parser.add_argument("config", metavar="TOML", help="configuration, such as deploy/demo.toml")
    add_set(parser)
    parser.set_defaults(handler=up)


def up(args: argparse.Namespace) -> int:
    """Start the run; returns when it has ended and every process is gone."""
    from headrace.config import load
    from headrace.launch.session import looped
    from headrace.launch.up import up as start

    return looped(start(load(args.config, args.set)))
