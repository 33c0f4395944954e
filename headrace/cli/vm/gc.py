"""`headrace vm gc`: removes images, templates and files from the cache to which nothing refers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("gc", help="remove cached files that no name, recipe or running host refers to")
    either = parser.add_mutually_exclusive_group()  # a dry run cannot tell what `--forget` would free
    either.add_argument(
        "--forget", action="append", default=[], metavar="NAME", help="drop this image or task template first"
    )
    either.add_argument("--dry-run", action="store_true", help="print which entries would be kept or removed, and why")
    add_config(parser)
    parser.set_defaults(handler=gc)


def gc(args: argparse.Namespace) -> int:
    """Print a line per entry and the sum."""
    from headrace.launch.admission import own
    from headrace.vmhost.templates import cache_gc

    environment = own(args.config, args.set).environment
    if args.dry_run:
        for entry in cache_gc.holdings(environment):
            verdict, why = ("keep", entry.why) if entry.why else ("drop", "nothing refers to it")
            say(f"{verdict} {entry.mib:8.1f} MiB  {entry.what:<28} {why}")
        return 0
    removed = cache_gc.collect(environment, tuple(args.forget))
    for entry in removed:
        say(f"gone {entry.mib:8.1f} MiB  {entry.what:<28} {Path(entry.path).name}")
    say(f"{sum(entry.mib for entry in removed):.1f} MiB freed")
    return 0
