"""`headrace tasks history`: writes a git repository whose commits fix generated bugs, for `tasks make commits`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("history", help="write a git repository whose commits fix generated bugs")
    parser.add_argument("folder", help="a folder that does not exist yet")
    parser.add_argument("--suite", default="generated/heldout", help="the generated suite whose bugs are fixed")
    parser.add_argument("--count", type=integer(1), default=80, help="fixes; some make no task")
    parser.set_defaults(handler=history)


def history(args: argparse.Namespace) -> int:
    """Write the repository and print the command that makes tasks of it."""
    from headrace.tasks.generated import histories

    try:
        fixes = histories.write(Path(args.folder), args.suite, args.count)
    except histories.HistoryError as error:
        raise RunError(str(error)) from None
    say(f"{fixes} fixes in {args.folder}; headrace tasks make commits {args.folder} --name SUITE makes tasks of them")
    return 0
