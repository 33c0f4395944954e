"""`headrace launch`: starts a run on several hosts by ssh, shows its state and its logs, and stops it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import integer

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

ACTIONS = ("start", "status", "logs", "stop")


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("launch", help="start, show or stop a run on several hosts, by ssh")
    parser.add_argument(
        "cluster", metavar="CLUSTER", help="TOML file with hosts and processes (deploy/hosts/cluster.toml)"
    )
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="start", help="default: start")
    parser.add_argument(
        "--lines", type=integer(1), default=20, help="number of last lines that `logs` shows of each log; default: 20"
    )
    parser.set_defaults(handler=launch)


def launch(args: argparse.Namespace) -> int:
    """Do one of the actions on every host."""
    from headrace.launch.cluster import launch as cluster
    from headrace.launch.session import looped

    path = Path(args.cluster)
    if args.action == "logs":
        return looped(cluster.logs(path, args.lines))
    return looped({"start": cluster.start, "status": cluster.status, "stop": cluster.stop}[args.action](path))
