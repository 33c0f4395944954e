"""`headrace tasks from-sdist`: makes a suite from mutations of a real package that the package's own tests detect."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("from-sdist", help="make tasks from mutations of a real package")
    parser.add_argument("package", nargs="?", default="", metavar="NAME==VERSION")
    parser.add_argument("--path", default="", metavar="DIR", help="a source tree instead of a package")
    parser.add_argument("--test-command", default="", help="command that runs its tests; default: python3 -m pytest")
    parser.add_argument("--count", type=integer(1), default=20, help="number of tasks")
    parser.add_argument("--seed", type=int, default=1, help="seed that draws the mutations")
    parser.add_argument("--name", default="", help="suite name; default: the package's name")
    add_config(parser)
    parser.set_defaults(handler=from_sdist)


def from_sdist(args: argparse.Namespace) -> int:
    """Build the suite and print its folder."""
    from headrace.launch.session import looped

    return looped(build(args))


async def build(args: argparse.Namespace) -> int:
    """Build the suite; every mutation is verified in a sandbox."""
    from headrace.launch.admission import own
    from headrace.launch.guests import prepare_host
    from headrace.tasks.packages import lab, sdist
    from headrace.vmhost.node.host import Host

    if bool(args.package) == bool(args.path):
        raise RunError("expected either a package (NAME==VERSION) or a source tree (--path DIR)")
    config = own(args.config, args.set)
    await prepare_host(config)
    host = await Host.open(config.environment, limits=config.sandboxes)
    try:
        request = sdist.SuiteRequest(
            package=args.package,
            path=Path(args.path) if args.path else None,
            test_command=args.test_command,
            count=args.count,
            seed=args.seed,
            name=args.name,
            root=Path(config.tasks.dir),
        )
        suite = await sdist.build(request, host, say)
    except lab.SuiteError as error:
        raise RunError(str(error), 1) from None
    finally:
        await host.close()
    say(f"{len(suite.ids())} tasks in {config.tasks.dir}/{suite.name}")
    return 0
