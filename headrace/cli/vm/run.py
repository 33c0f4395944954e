"""`headrace vm run`: runs a command in a fresh sandbox and streams its output."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import number, setting
from headrace.cli.vm.session import add_sandbox, declare, follow, fresh
from headrace.config import Config

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = declare(commands, "run", "run a command in a fresh sandbox and stream its output", run)
    add_sandbox(parser)
    parser.add_argument("--pull", default="", metavar="TAR", help="write the workspace to an archive afterwards")
    parser.add_argument("--env", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--timeout", type=number(0, above=True), default=3600.0, help="seconds")
    parser.add_argument("argv", nargs="*", metavar="COMMAND", help="command to run, after --; default: the image's own")


async def run(config: Config, args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from headrace.messages.sandbox import PullTar, StartJob
    from headrace.vmhost.errors import VmhostError

    argv = tuple(args.argv) or _command_of(config, args.template)
    async with fresh(config, args.template, args.push) as (_, sandbox):
        job = StartJob(argv=argv, env=dict(args.env), user=args.user, timeout_s=args.timeout)
        code = await follow(sandbox, await sandbox.call(job))
        if args.pull:
            pulled = await sandbox.call(PullTar())
            if not pulled.ok:
                raise VmhostError(f"the workspace could not be pulled: {pulled.error}")
            Path(args.pull).write_bytes(pulled.data)
    return code


def _command_of(config: Config, template: str) -> tuple[str, ...]:
    """Entry point and command of the template's image. VmhostError when it has none."""
    from headrace.vmhost.errors import VmhostError
    from headrace.vmhost.images import base

    plan = base.plan(config.environment, template)
    while plan.below is not None:
        plan = plan.below
    command = (*plan.image.entrypoint, *plan.image.cmd) if plan.image else ()
    if not command:
        raise VmhostError(f"template {template} has no command of its own; add -- COMMAND")
    return command
