"""`headrace audit`: verify from the streams alone that nothing was lost, trained twice or trained too stale."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_elsewhere, add_run

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("audit", help="verify that nothing was lost, trained twice or too stale")
    add_run(parser)
    add_elsewhere(parser)
    parser.set_defaults(handler=audit)


def audit(args: argparse.Namespace) -> int:
    """Print the report as one JSON line, and every fault in a sentence on standard error; 1 when the ledger does not
    balance."""
    from headrace.launch.output import complain, say_report
    from headrace.launch.session import looped, run_of
    from headrace.replay.audit import prove

    async def body() -> int:
        async with run_of(args.run, args.config) as run:
            report, faults = await prove(run.bus, run.id)
        say_report(report)
        for fault in faults:
            complain(fault)
        return 0 if report.balanced else 1

    return looped(body())
