"""`headrace keys list`: the API keys that exist, by their ids."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("list", help="print a line per key: id, tenant, rate, opt-in to training, scopes")
    add_config(parser)
    parser.set_defaults(handler=show)


def show(args: argparse.Namespace) -> int:
    """Print a line per key."""
    from headrace.cli.keys.session import keys_of
    from headrace.launch.output import say

    for entry in keys_of(args).entries():
        opted = "training allowed" if entry.training else "never trained on"
        say(f"{entry.id}  {entry.tenant:<20}{entry.requests_per_minute:>6}/min  {opted:<18}{' '.join(entry.scopes)}")
    return 0
