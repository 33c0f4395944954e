"""`headrace tasks`: suites from real packages, and a look at one task."""

import argparse
from pathlib import Path

from headrace.config import Config
from headrace.launch.guests import prepare_host
from headrace.launch.output import say
from headrace.launch.runs import RunError


def show(config: Config, suite: str, task: str) -> int:
    """One task as the agent sees it: prompt and files, never the hidden tests."""
    from headrace.tasks import open_suite
    from headrace.tasks.suites import UnknownSuite

    try:
        found = open_suite(suite, config.tasks.dir).task(task)
    except UnknownSuite as error:
        raise RunError(str(error)) from None
    say(f"{found.ref.suite} {found.ref.task} ({found.family})\n{found.prompt}\n")
    for path, data in sorted(found.files.items()):
        if len(found.files) < 20:
            say(f"--- {path}\n{data.decode('utf-8', 'replace')}")
        else:
            say(f"{len(data):8} {path}")
    return 0


async def from_sdist(config: Config, args: argparse.Namespace) -> int:
    """Make a suite of mutations that the package's own tests catch, each verified in a sandbox."""
    from headrace.tasks import sdist
    from headrace.vmhost.host import Host

    if bool(args.package) == bool(args.path):
        raise RunError("name a package (NAME==VERSION) or a source tree (--path DIR), one of the two")
    await prepare_host(config)
    host = await Host.open(config.environment)
    try:
        suite = await sdist.build(
            package=args.package,
            path=Path(args.path) if args.path else None,
            test_command=args.test_command,
            count=args.count,
            seed=args.seed,
            name=args.name,
            root=Path(config.tasks.dir),
            acquire=host.acquire,
            release=host.release,
            say=say,
        )
    except sdist.SuiteError as error:
        raise RunError(str(error), 1) from None
    finally:
        await host.close()
    say(f"{len(suite.ids())} tasks in {config.tasks.dir}/{suite.name}")
    return 0
