"""`headrace check`: find problems that would prevent a run from starting, before anything is started."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("check", help="find problems that would prevent a run from starting; starts nothing")
    parser.add_argument("config", nargs="?", default="", metavar="TOML", help="configuration; default: all defaults")
    add_set(parser)
    parser.set_defaults(handler=check)


def check(args: argparse.Namespace) -> int:
    """Print a line per finding, problems first; 1 when there is a problem, 2 when the configuration is wrong."""
    from headrace.launch.admission import own
    from headrace.launch.checks import actors, machine, model, network, trainer, versions
    from headrace.launch.output import say
    from headrace.launch.session import looped

    config = own(args.config, args.set)

    async def body() -> int:
        findings = [*actors.check(config), *machine.check(config), *model.check(config), *trainer.check(config)]
        findings += [finding async for finding in network.check(config)]
        findings += [finding async for finding in versions.check(config)]
        for finding in sorted(findings, key=lambda finding: finding.good):
            say(f"{'ok  ' if finding.good else 'BAD '} {finding.part}: {finding.text}")
        return 0 if all(finding.good for finding in findings) else 1

    return looped(body())
