"""`headrace images gc`: remove images without a name, layers without an image, and interrupted downloads."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("gc", help="remove layers and images that no image name refers to")
    parser.add_argument("--forget", action="append", default=[], metavar="NAME", help="remove this image's name first")
    add_config(parser)
    parser.set_defaults(handler=gc)


def gc(args: argparse.Namespace) -> int:
    """Remove the entries; print a line for each, and the sum."""
    from headrace.launch.admission import own
    from headrace.vmhost.templates import cache_gc

    environment = own(args.config, args.set).environment
    removed = cache_gc.collect(environment, tuple(args.forget), cache_gc.IMAGES)
    for entry in removed:
        say(f"gone {entry.mib:8.1f} MiB  {entry.what:<28} {Path(entry.path).name}")
    say(f"{sum(entry.mib for entry in removed):.1f} MiB freed")
    return 0
