"""`headrace promote`: serve a version to users at once, without the gate."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run, integer
from headrace.launch.output import say

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("promote", help="serve a version to users at once, without the gate")
    add_run(parser, optional=False)
    parser.add_argument("version", type=integer(0), help="a published version")
    parser.add_argument("--branch", action="store_true", help="the version belongs to the run's branch, not to the run")
    parser.add_argument("--reason", default="by an operator", help="reason for the promotion, stored in its record")
    parser.set_defaults(handler=promote)


def promote(args: argparse.Namespace) -> int:
    """Request the promotion from the run's feedback actor, and wait for its answer."""
    from headrace.cli.feedback.asking import ask
    from headrace.config import Config, branch_name, load
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped
    from headrace.messages.product import Promotion

    async def body() -> int:
        folder = runs.find(args.run)
        config = load(folder.config) if folder.config.is_file() else Config()
        branch = branch_name(folder.id, config.feedback) if args.branch else ""
        async with bus_of(folder) as bus:
            await ask(bus, Promotion(run=folder.id, version=args.version, branch=branch, reason=args.reason))
        say(f"version {args.version}{f' of {branch}' if branch else ''} serves new sessions of run {folder.id}")
        return 0

    return looped(body())
