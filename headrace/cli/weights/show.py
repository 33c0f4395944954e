"""`headrace weights show`: prints all fields of one published version."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.weights.session import add_common, add_version, declare
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.cli.weights.session import Chain


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "show", "print one version in full", show)
    add_common(parser)
    add_version(parser)


async def show(chain: "Chain", args: argparse.Namespace) -> int:
    """Print the version."""
    from headrace.weights import report

    say(await report.show(chain.bus, chain.folder.id, args.version))
    return 0
