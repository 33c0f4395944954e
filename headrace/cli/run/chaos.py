"""`headrace chaos`: starts a run and injects faults into it."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set, integer, number

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("chaos", help="start a run as `up` does, and inject faults into all of its processes")
    parser.add_argument("config", metavar="TOML", help="configuration, such as deploy/demo.toml")
    parser.add_argument(
        "--kills", type=integer(1), default=200, help="number of faults; a run that is too short for them is lengthened"
    )
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=("kill", "stop", "cut"),
        default=("kill", "stop", "cut"),
        help="kinds of fault, all by default: kill -9, SIGSTOP for a while, cut connections",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the fault plan")
    parser.add_argument("--minutes", type=number(0, above=True), default=60.0, help="time limit of the run")
    add_set(parser)
    parser.set_defaults(handler=chaos)


def chaos(args: argparse.Namespace) -> int:
    """Start the run and the fault injector; 1 when the audit does not balance or a fault was not injected."""
    from headrace.chaos.run import chaos as inject
    from headrace.launch.session import looped

    return looped(inject(args))
