"""`headrace wire`: print the fields of every message as Markdown; docs/wire.md ends with its output."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("wire", help="print every message and its fields as Markdown (docs/wire.md)")
    parser.set_defaults(handler=wire)


def wire(args: argparse.Namespace) -> int:
    """Print the tables."""
    from headrace.cli.run import fields

    sys.stdout.write(fields.table())
    return 0
