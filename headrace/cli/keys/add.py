"""`headrace keys add`: creates an API key for a tenant."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("add", help="make a key for a tenant and print it; only its hash is stored")
    parser.add_argument("tenant", help="name of the tenant")
    parser.add_argument(
        "--training", action="store_true", help="the tenant opts in: rated sessions of this key may be trained on"
    )
    parser.add_argument("--rate", type=integer(1), default=600, metavar="N", help="requests a minute (default 600)")
    parser.add_argument(
        "--scope",
        action="append",
        choices=("turns", "agents", "feedback", "purge"),
        help="what the key opens; repeat it for several (default: turns, agents, feedback)",
    )
    add_config(parser)
    parser.set_defaults(handler=make)


def make(args: argparse.Namespace) -> int:
    """Create and print the key."""
    from headrace.cli.keys.session import keys_of
    from headrace.gateway.tenants.keys import USUAL
    from headrace.launch.output import say

    scopes = args.scope or USUAL
    say(keys_of(args).add(args.tenant, training=args.training, requests_per_minute=args.rate, scopes=scopes))
    return 0
