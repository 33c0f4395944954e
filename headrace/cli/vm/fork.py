"""`headrace vm fork`: prepare a sandbox, fork it while it runs, and run a command in every fork."""

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import integer
from headrace.cli.vm.session import add_sandbox, declare, fresh, request
from headrace.config import Config
from headrace.launch.output import say, say_report

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


class ForkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The forks of a running sandbox."""

    forks: int
    fork_wall_ms: float
    """From the request to the last fork that answers."""
    codes: list[int]
    """The exit code of the command in each fork."""


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "fork", "fork a running sandbox and run a command in every fork", fork)
    add_sandbox(parser)
    parser.add_argument("--prepare", default="", metavar="COMMAND", help="shell command to run before the fork")
    parser.add_argument("--count", type=integer(1), default=2, help="number of forks")
    parser.add_argument("argv", nargs="*", metavar="COMMAND", help="command to run, after --; default: true")


async def fork(config: Config, args: argparse.Namespace) -> int:
    """Print every fork's output and a JSON line; 1 when a command failed."""
    from headrace.messages.sandbox import Exec
    from headrace.vmhost.errors import VmhostError

    count = args.count
    async with fresh(config, args.template, args.push, max_vms=count + 3, judge_share=0) as (host, sandbox):
        if args.prepare:
            done = await sandbox.call(Exec(argv=("sh", "-c", args.prepare), user=args.user, timeout_s=3600.0))
            if not done.ok:
                raise VmhostError(f"the preparation failed: {done.error}: {(done.stdout + done.stderr)[-500:].strip()}")
        started = time.perf_counter()
        forks = await host.fork(sandbox.id, [request(args.template, 1 + slot) for slot in range(count)])
        took = time.perf_counter() - started
        command = Exec(argv=tuple(args.argv) or ("true",), user=args.user, timeout_s=3600.0)
        results = await asyncio.gather(*(forked.call(command) for forked in forks))
    for number, result in enumerate(results):
        for line in (result.stdout + result.stderr).splitlines():
            say(f"{number}: {line}")
    codes = [result.code for result in results]
    say_report(ForkReport(forks=count, fork_wall_ms=round(took * 1000, 1), codes=codes))
    return 0 if not any(codes) else 1
