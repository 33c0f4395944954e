"""`headrace lines report`: tell the gateways how many lines of their agents this repository still has."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_key, key_of
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("report", help="report the lines of watched runs that are due; one JSON line each")
    parser.add_argument("--merged", action="store_true", help="a merge just ended: report all watched runs as merged")
    add_key(parser)
    parser.set_defaults(handler=report)


def report(args: argparse.Namespace) -> int:
    """Report to every gateway of a watched run. Exit code 1 when a report failed."""
    from headrace.gateway.acp.api import AgentsApi
    from headrace.gateway.signals.reporting import LinesError, Repository

    async def body(repository: Repository) -> bool:
        failed = False
        for url in sorted({noted.url for noted in repository.noted()}):
            async with AgentsApi(url, key_of(args)) as api:
                for answer in await repository.report(api, url, merged=args.merged):
                    failed |= "error" in answer
                    print(json.dumps(answer))
        return failed

    try:
        return int(asyncio.run(body(Repository(Path.cwd()))))
    except LinesError as error:
        raise RunError(str(error)) from None
