"""`headrace rollback`: serve the version that was promoted before the present one, and end the candidate."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("rollback", help="serve the version that was promoted before the present one")
    add_run(parser, optional=False)
    parser.set_defaults(handler=rollback)


def rollback(args: argparse.Namespace) -> int:
    """Request the previous version from the run's feedback actor, and wait for its answer."""
    import msgspec

    from headrace.cli.feedback.asking import ask, promoted
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped

    async def body() -> int:
        folder = runs.find(args.run)
        async with bus_of(folder) as bus:
            records = await promoted(bus, folder.id)
            earlier = [record for record in records if record.policy != records[-1].policy]
            if not earlier:
                raise RunError(f"run {folder.id} has no version that was promoted before the present one")
            target = earlier[-1]
            await ask(bus, msgspec.structs.replace(target, reason="rollback by an operator"))
        name = f"version {target.version}{f' of {target.branch}' if target.branch else ''}"
        say(f"{name} serves new sessions of run {folder.id} again")
        return 0

    return looped(body())
