"""Commands that show a run: its actors, its logs, and the audit of its streams."""

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_elsewhere, add_run
from headrace.launch.output import say, say_report

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the commands."""
    for declare in (_add_top, _add_logs, _add_audit):
        declare(commands)


def _add_top(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("top", help="show the actors of a run live")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=top)


def top(args: argparse.Namespace) -> int:
    """Show the screen until the user quits."""

    from headrace.config import Config, load
    from headrace.dashboard.watch import Watch
    from headrace.launch import logs, runs
    from headrace.launch.session import run_of

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise runs.RunError("`headrace top` needs a terminal: `headrace status` prints the actors once", 2)
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
        return [logs.shown(line) for line in logs.read(folder.logs, logs.LineFilter(actor=id), {})]

    async def body() -> int:
        async with run_of(args.run, args.config) as run:
            if not run.served:
                raise runs.RunError(f"run {run.id} is over: `headrace dashboard {run.id}` shows it")
            await run_top(Watch(run.bus, run.id, config, time.time()), run.bus, run.id, lines_of)
        return 0

    return asyncio.run(body())  # not on uvloop: its signal handling conflicts with Textual's


def _add_logs(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("logs", help="show the logs of a run, of one actor or of one trace")
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until interrupted")
    parser.add_argument("--actor", default="", metavar="NAME", help="only this actor, process or actor id")
    parser.add_argument("--trace", default="", metavar="ID", help="only lines of this trace (its first digits suffice)")
    parser.add_argument(
        "--level", default="", choices=("debug", "info", "warning", "error"), help="only lines of this level and above"
    )
    parser.set_defaults(handler=logs)


def logs(args: argparse.Namespace) -> int:
    """Print the lines that pass the filters."""
    from headrace.launch import logs as reading
    from headrace.launch import runs

    folder = runs.find(args.run)
    if not folder.logs.is_dir():
        raise runs.RunError(f"{folder.path} has no logs: its actors were started elsewhere, see their own output")
    wanted = reading.LineFilter(args.actor, args.trace, args.level)
    reading.follow(folder.logs, wanted, say, ends=lambda: not args.follow)
    return 0


def _add_audit(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("audit", help="verify that nothing was lost, trained twice or too stale")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=audit)


async def audit(args: argparse.Namespace) -> int:
    """Print the report as one JSON line, and every fault in a sentence on standard error; 1 when the ledger does not
    balance."""
    from headrace.launch.output import complain
    from headrace.launch.session import run_of
    from headrace.replay.audit import prove

    async with run_of(args.run, args.config) as run:
        report, faults = await prove(run.bus, run.id)
    say_report(report)
    for fault in faults:
        complain(fault)
    return 0 if report.balanced else 1
