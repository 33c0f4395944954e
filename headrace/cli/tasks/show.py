"""`headrace tasks show`: prints one task as the agent sees it."""

import argparse
from typing import TYPE_CHECKING

from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("show", help="print one task as the agent sees it")
    parser.add_argument("suite")
    parser.add_argument("task")
    parser.add_argument("--config", default="", metavar="TOML", help="configuration file")
    parser.set_defaults(handler=show)


def show(args: argparse.Namespace) -> int:
    """Print prompt and files; hidden tests are never shown."""
    from headrace.launch import admission
    from headrace.tasks import open_suite
    from headrace.tasks.base import UnknownSuite, both_sides

    try:
        task, _ = both_sides(open_suite(admission.suite(args.suite), admission.own(args.config).tasks.dir), args.task)
    except UnknownSuite as error:
        raise RunError(str(error)) from None
    say(f"{task.ref.suite} {task.ref.task} ({task.family})\n{task.prompt}\n")
    for path, data in sorted(task.files.items()):
        if len(task.files) < 20:
            say(f"--- {path}\n{data.decode('utf-8', 'replace')}")
        else:
            say(f"{len(data):8} {path}")
    return 0
