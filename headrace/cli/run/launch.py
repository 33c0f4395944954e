"""`headrace launch`: starts a run on several hosts by ssh, shows its state and its logs, and stops it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import integer

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from headrace.cli.arguments import Commands
    from headrace.launch.supervision.signals import Stopping

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
    import uvloop

    from headrace.launch.cluster import launch as cluster
    from headrace.launch.supervision.signals import interruptible

    path = Path(args.cluster)

    async def body(stopping: "Stopping", _: "AsyncExitStack") -> int:
        if args.action == "logs":
            return await cluster.logs(path, args.lines)
        if args.action == "start":
            stopping.effect = "the hosts that this launch started are stopped again"
            return await cluster.start(path)
        stopping.effect = "the hosts complete the command that they received"
        return await {"status": cluster.status, "stop": cluster.stop}[args.action](path)

    return uvloop.run(interruptible(body))
