"""`headrace weights log`: prints a line per published version."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.weights.session import add_common, declare
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    add_common(declare(commands, "log", "print a line per version", log))


async def log(chain: "Chain", args: argparse.Namespace) -> int:
    """Print the log."""
    from headrace.weights import report

    say(await report.log(chain.bus, chain.folder.id))
    return 0
