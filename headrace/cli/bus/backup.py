"""`headrace bus backup`: copy every stream and bucket of a run's broker into a folder."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_elsewhere

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("backup", help="copy all streams and buckets of a run's broker into a folder")
    parser.add_argument("folder", metavar="DIR", help="a new folder")
    parser.add_argument("--run", default="latest", help="run id, path or 'latest' (default)")
    add_elsewhere(parser)
    parser.add_argument(
        "--live", action="store_true", help="back up while actors run: the copies are from different moments"
    )
    parser.set_defaults(handler=backup)


def backup(args: argparse.Namespace) -> int:
    """Copy, and print the number of messages and bytes."""
    from headrace.bus.backup import back_up
    from headrace.launch.output import say
    from headrace.launch.session import looped, run_of

    async def body() -> int:
        async with run_of(args.run, args.config, "admin") as run:
            made = await back_up(run.bus, run.id, Path(args.folder), live=args.live)
        size = sum(copy.bytes for copy in made.copies)
        say(f"run {made.run}: {made.messages} messages of {len(made.copies)} streams, {size} bytes, in {args.folder}/")
        return 0

    return looped(body())
