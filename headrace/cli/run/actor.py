"""`headrace actor`: a process that runs one or several actors until it is told to stop."""

import argparse
from typing import TYPE_CHECKING

from headrace.actors.registry import ACTORS

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("actor", help="start one actor (or several, comma-separated) on this node")
    parser.add_argument("names", metavar="NAME[,NAME...]", help=f"{', '.join(ACTORS)}; NAME:ID sets the actor's id")
    parser.add_argument("--config", required=True, metavar="TOML", help="configuration file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help="run id; default: [run] id of the configuration")
    parser.add_argument("--url", default="", help="broker; default: [bus] url of the configuration")
    parser.add_argument("--credentials", default="", help="folder of per-role credentials")
    parser.set_defaults(handler=actor)


def actor(args: argparse.Namespace) -> int:
    """Run the actors in this process."""
    from headrace.launch.admission import own
    from headrace.launch.serve import serve

    return serve(own(args.config, args.set), args.names.split(","), args.run, args.url, args.credentials)
