"""`headrace subjects`: prints the table of subjects and streams; docs/subjects.md is its output."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    commands.add_parser("subjects", help="print the table of subjects and streams").set_defaults(handler=subjects)


def subjects(args: argparse.Namespace) -> int:
    """Print the table in Markdown."""
    from headrace.messages.subjects import table

    print(table(), end="")
    return 0
