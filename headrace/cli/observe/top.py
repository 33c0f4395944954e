"""`headrace top`: the actors of a run in the terminal, live."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_elsewhere, add_run

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("top", help="show the actors of a run live: sort, filter, figures, logs, drain")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=top)


def top(args: argparse.Namespace) -> int:
    """Show the screen until the user quits."""
    import asyncio
    import time

    from headrace.config import Config, load
    from headrace.dashboard.watch import Watch
    from headrace.launch import logs, runs
    from headrace.launch.session import run_of

    try:
        from headrace.dashboard.terminal import run_top
    except ImportError as error:
        raise runs.RunError(f"{error.name} is not installed: pip install 'headrace[terminal]'", 3) from None
    folder = None if args.config else runs.find(args.run)
    source = args.config or (folder.config if folder is not None and folder.config.is_file() else None)
    config = load(source) if source else Config()

    def lines_of(id: str) -> list[str]:
        if folder is None or not folder.logs.is_dir():
            return ["the logs are on the actor's host"]
        return [logs.shown(line) for line in logs.read(folder.logs, logs.Wanted(actor=id), {})]

    async def body() -> int:
        async with run_of(args.run, args.config) as run:
            if not run.served:
                raise runs.RunError(f"run {run.id} is over: `headrace dashboard {run.id}` shows it")
            await run_top(Watch(run.bus, run.id, config, time.time()), run.bus, run.id, lines_of)
        return 0

    return asyncio.run(body())  # not on uvloop: its signal handling conflicts with Textual's
