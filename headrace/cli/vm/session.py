"""Functions that the commands of `headrace vm` share: open a host and a sandbox in it, and stream a job's output.

A command opens a host of its own and closes it at the end. Output is printed while the job writes it, through the calls
that an agent's tools use too.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import add_config
from headrace.config import Config
from headrace.launch.admission import own

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.messages.sandbox import Acquire, OpResult, Sandbox
    from headrace.vmhost.node.host import Host, VmSandbox

TEMPLATE_HELP = "light, debian, an imported image or a task template"


def declare(
    commands: "Commands", name: str, text: str, command: Callable[[Config, argparse.Namespace], Awaitable[int]]
) -> argparse.ArgumentParser:
    """Declare a subcommand that works with sandboxes: `command` runs on an event loop with the configuration."""
    parser = commands.add_parser(name, help=text)
    parser.set_defaults(handler=lambda args: execute(command, args))
    add_config(parser)
    return parser


def execute(command: Callable[[Config, argparse.Namespace], Awaitable[int]], args: argparse.Namespace) -> int:
    """Load the configuration and run the command. VmhostError when its sandbox is lost or refused."""
    from headrace.launch.session import looped
    from headrace.messages.sandbox import NoCapacity, SandboxLost
    from headrace.vmhost.errors import VmhostError

    try:
        return looped(command(own(args.config, args.set), args))
    except (SandboxLost, NoCapacity) as error:
        raise VmhostError(str(error)) from None


def add_sandbox(parser: argparse.ArgumentParser) -> None:
    """`--template`, `--push` and `--user`."""
    parser.add_argument("--template", default="light", help=TEMPLATE_HELP)
    parser.add_argument("--push", default="", metavar="DIR", help="folder to copy into the workspace")
    parser.add_argument("--user", default="", help="user of an imported image")


def request(template: str, slot: int = 0, group: str = "hand") -> "Acquire":
    """A request for a sandbox with a machine of its own."""
    from headrace.messages.sandbox import Acquire

    return Acquire(
        run="hand",
        lane="eval",
        role="rollout",
        group=group,
        slot=slot,
        attempt=0,
        isolation="episode",
        template=template,
    )


def _tell(kind: str, text: str, data: dict[str, Any]) -> None:
    """Print progress while a template is built, which takes long; failures are raised as errors."""
    if kind == "vm_template":
        sys.stderr.write(f"headrace: {text}\n")


@asynccontextmanager
async def fresh(
    config: Config, template: str, push: str = "", **changes: object
) -> "AsyncIterator[tuple[Host, VmSandbox]]":
    """A host with one sandbox whose workspace holds the folder `push`. changes: keys of [environment]."""
    from headrace.messages.sandbox import PushTar
    from headrace.vmhost.backends.registry import capabilities
    from headrace.vmhost.errors import VmhostError
    from headrace.vmhost.images import base
    from headrace.vmhost.node.host import Host
    from headrace.vmhost.templates import task_templates

    environment = msgspec.structs.replace(config.environment, warm=0, **changes)
    if capabilities(environment.backend).kernel_private:
        base.plan(environment, template)  # refuses an unknown template before anything is built
    tree = task_templates.archive(Path(push)) if push else b""
    host = await Host.open(environment, on_event=_tell, limits=config.sandboxes)
    try:
        sandbox = await host.acquire(request(template))
        if push:
            pushed = await sandbox.call(PushTar(data=tree))
            if not pushed.ok:
                raise VmhostError(f"{push} could not be pushed: {pushed.error}")
        yield host, sandbox
    finally:
        await host.close()


async def follow(sandbox: "Sandbox", started: "OpResult") -> int:
    """Show a job's output as it appears; return its exit code. The first Ctrl-C interrupts the job, the second kills
    it."""
    from headrace.messages.sandbox import FollowJob, StopJob
    from headrace.vmhost.errors import VmhostError

    if not started.ok:
        raise VmhostError(f"the command could not be started: {started.error}")
    loop, handled = asyncio.get_running_loop(), 0
    presses: list[float] = []
    with suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, lambda: presses.append(time.monotonic()))
    try:
        while True:
            piece = asyncio.ensure_future(sandbox.call(FollowJob(job=started.job, wait_s=1.0)))
            await asyncio.wait([piece])
            output = piece.result()
            for stream, text in ((sys.stdout, output.stdout), (sys.stderr, output.stderr)):
                try:
                    stream.write(text)
                    stream.flush()
                except BrokenPipeError:  # the reader has gone (`| head`): send the job SIGPIPE, as a pipe does
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    await sandbox.call(StopJob(job=started.job, signal=signal.SIGPIPE))
            if len(presses) > handled:
                handled = len(presses)
                end = signal.SIGINT if handled == 1 else signal.SIGKILL
                await sandbox.call(StopJob(job=started.job, signal=end))
            if not output.running:
                if output.timed_out:
                    raise VmhostError(output.error)
                return output.code if output.code >= 0 else 128 - output.code
    finally:
        with suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
