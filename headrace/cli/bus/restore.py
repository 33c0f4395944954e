"""`headrace bus restore`: create the streams and buckets of a backup on a broker that has none."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("restore", help="restore a backup into a broker that has no streams")
    parser.add_argument("folder", metavar="DIR", help="made by headrace bus backup")
    parser.add_argument("--config", required=True, metavar="TOML", help="with [run] id, [bus] url and credentials")
    parser.set_defaults(handler=restore)


def restore(args: argparse.Namespace) -> int:
    """Restore, and print the number of messages."""
    from headrace.bus.backup import restore as restored
    from headrace.launch.output import say
    from headrace.launch.session import looped, run_of

    async def body() -> int:
        async with run_of("", args.config, "admin") as run:
            backup = await restored(run.bus, Path(args.folder))
        say(f"run {backup.run}: {backup.messages} messages of {len(backup.copies)} streams are restored")
        return 0

    return looped(body())
