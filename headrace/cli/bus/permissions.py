"""`headrace bus permissions`: print the matrix of roles as Markdown; docs/permissions.md is its output."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("permissions", help="print what each role may publish, read and purge, as Markdown")
    parser.set_defaults(handler=permissions)


def permissions(args: argparse.Namespace) -> int:
    """Print the page."""
    from headrace.bus.broker import matrix

    sys.stdout.write(matrix.table())
    return 0
