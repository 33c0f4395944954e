"""`headrace vm doctor`: checks whether this host can run microVMs, and names missing parts."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("doctor", help="check whether this host can run microVMs")
    add_config(parser)
    parser.set_defaults(handler=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print a line per finding; 1 when this host cannot run microVMs."""
    from headrace.launch.admission import own
    from headrace.vmhost.node.doctor import doctor as examine

    findings = examine(own(args.config, args.set).environment)
    for finding in findings:
        say(f"{'ok  ' if finding.good else 'BAD '} {finding.text}")
    return 0 if all(finding.good for finding in findings) else 1
