"""`headrace lines watch`: follow the lines that a run of an agent added to this repository."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("watch", help="follow the lines that a run of an agent added to this git repository")
    parser.add_argument("agent", help="id of the agent")
    parser.add_argument("run", help="id of its run, whose changes are in the work tree now")
    parser.add_argument("--url", required=True, help="address of the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("--hook", action="store_true", help="also report after every merge, by a post-merge hook")
    parser.set_defaults(handler=watch)


def watch(args: argparse.Namespace) -> int:
    """Note the run, and make the hook."""
    import time

    from headrace.gateway.signals.reporting import LinesError, Noted, Repository

    try:
        repository = Repository(Path.cwd())
        if args.hook:
            repository.install_hook()
        url = args.url.rstrip("/")
        repository.note(Noted(url=url, agent=args.agent, run=args.run, since=time.time()))
    except LinesError as error:
        raise RunError(str(error)) from None
    say("`headrace lines report` reports what is due after 10 minutes and after 24 hours: call it from cron")
    return 0
