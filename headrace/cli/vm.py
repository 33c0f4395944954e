"""Commands about the sandboxes of this host: templates, commands in a fresh sandbox, tools for outside agents.

A command that works with a sandbox opens a host of its own and closes it at the end. Output is printed while the job
writes it, through the calls that an agent's tools use too.
"""

import argparse
import asyncio
import importlib.util
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import add_config, group, number, setting
from headrace.config import Config, ConfigError
from headrace.launch.guests import end_together
from headrace.launch.output import say
from headrace.messages.tasks import DEFAULT_TOOLS, TestPlan

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.messages.sandbox import Acquire, OpResult, Sandbox
    from headrace.vmhost.node.host import Host, VmSandbox


SHELL = ("sh", "-i")
TEMPLATE_HELP = "light, debian or an imported image"


def add(commands: "Commands") -> None:
    """Declare the commands."""
    subcommands = group(commands, "vm", "guest images and sandboxes of this host")
    for declare in (_add_build, _add_run, _add_gc):
        declare(subcommands)
    _add_mcp(group(commands, "mcp", "serve headrace's tools to external agents"))


def add_sandbox(parser: argparse.ArgumentParser) -> None:
    """`--template`, `--push`, `--user` and the configuration."""
    parser.add_argument("--template", default="light", help=TEMPLATE_HELP)
    parser.add_argument("--push", default="", metavar="DIR", help="folder to copy into the workspace")
    parser.add_argument("--user", default="", help="user of an imported image")
    add_config(parser)


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

    environment = msgspec.structs.replace(config.environment, warm=0, **changes)
    if capabilities(environment.backend).kernel_private:
        base.plan(environment, template)  # refuses an unknown template before anything is built
    tree = _archive(Path(push)) if push else b""
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


def _archive(folder: Path) -> bytes:
    """A folder as a tar archive. VmhostError."""
    from headrace.archives.tars import packed
    from headrace.vmhost.errors import VmhostError

    try:
        return packed(folder)
    except OSError as error:
        raise VmhostError(f"{folder} cannot be read: {error.strerror}") from None


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


def _add_build(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("build", help="build and cache a template")
    parser.add_argument("name", nargs="?", default="light", help=TEMPLATE_HELP)
    add_config(parser)
    parser.set_defaults(handler=build)


def build(args: argparse.Namespace) -> int:
    """Build and cache the template."""
    from headrace.vmhost.images import base

    environment = args.settings.environment
    end_together()
    made = base.ensure(environment, say, (args.name,))[args.name]
    if args.name != "light":
        say(f"template {args.name}: {made.manifest.key}, built in {made.manifest.built_s:g} s, {made.folder}")
    return 0


def _add_run(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="run a command in a fresh sandbox, or open a terminal in one")
    add_sandbox(parser)
    parser.add_argument("--terminal", action="store_true", help="give the command, or else a shell, this terminal")
    parser.add_argument("--pull", default="", metavar="TAR", help="write the workspace to an archive afterwards")
    parser.add_argument("--env", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--timeout", type=number(0, above=True), help="seconds (default 3600, a terminal: a day)")
    parser.add_argument("argv", nargs="*", metavar="COMMAND", help="command to run, after --; default: the image's own")
    parser.set_defaults(handler=run)


async def run(args: argparse.Namespace) -> int:
    """Run the command, stream its output, and return its exit code."""
    from headrace.messages.sandbox import StartJob

    argv = tuple(args.argv) or (SHELL if args.terminal else _command_of(args.settings, args.template))
    env = dict(args.env)
    if args.terminal:
        env = {"TERM": os.environ.get("TERM", "dumb"), "PS1": f"{args.template}:\\w$ "} | env
    timeout_s = args.timeout or (86400.0 if args.terminal else 3600.0)
    async with fresh(args.settings, args.template, args.push) as (_, sandbox):
        job = StartJob(argv=argv, terminal=args.terminal, env=env, user=args.user, timeout_s=timeout_s)
        started = await sandbox.call(job)
        async with _typed(sandbox, started.job) if args.terminal else nullcontext():
            code = await follow(sandbox, started)
        await pull(sandbox, args.pull)
    return code


async def pull(sandbox: "Sandbox", target: str) -> None:
    """Write the workspace to an archive, unless `target` is empty. VmhostError."""
    from headrace.messages.sandbox import PullTar
    from headrace.vmhost.errors import VmhostError

    if not target:
        return
    pulled = await sandbox.call(PullTar())
    if not pulled.ok:
        raise VmhostError(f"the workspace could not be pulled: {pulled.error}")
    Path(target).write_bytes(pulled.data)


def _command_of(config: Config, template: str) -> tuple[str, ...]:
    """Entry point and command of the template's image. VmhostError when it has none."""
    from headrace.vmhost.errors import VmhostError
    from headrace.vmhost.images import base

    plan = base.plan(config.environment, template)
    command = (*plan.image.entrypoint, *plan.image.cmd) if plan.image else ()
    if not command:
        raise VmhostError(f"template {template} has no command of its own; add -- COMMAND")
    return command


@asynccontextmanager
async def _typed(sandbox: "Sandbox", job: int) -> AsyncIterator[None]:
    """The terminal in raw mode, and what is typed sent to the job."""
    fd = sys.stdin.fileno()
    raw = os.isatty(fd)
    before = termios.tcgetattr(fd) if raw else []
    if raw:
        tty.setraw(fd)
    feeder = asyncio.create_task(_feed(sandbox, job, fd))
    try:
        yield
    finally:
        feeder.cancel()
        os.set_blocking(fd, True)
        if raw:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _feed(sandbox: "Sandbox", job: int, fd: int) -> None:
    """Send typed bytes to the job until the end of the input."""
    from headrace.messages.sandbox import FeedJob

    reader = asyncio.StreamReader()
    with os.fdopen(os.dup(fd), "rb", buffering=0) as typed:
        try:
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), typed)
            read: Callable[[int], Awaitable[bytes]] = reader.read
        except (ValueError, OSError):  # a regular file cannot be polled
            read = partial(asyncio.to_thread, typed.read)
        while data := await read(4096):
            await sandbox.call(FeedJob(job=job, data=data))
        await sandbox.call(FeedJob(job=job, last=True))


def _add_gc(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("gc", help="remove cached files that no name or running host refers to")
    either = parser.add_mutually_exclusive_group()  # a dry run cannot tell what `--forget` would free
    either.add_argument("--forget", action="append", default=[], metavar="NAME", help="drop this image first")
    either.add_argument("--dry-run", action="store_true", help="print which entries would be kept or removed, and why")
    add_config(parser)
    parser.set_defaults(handler=gc)


def gc(args: argparse.Namespace) -> int:
    """Print a line per entry and the sum."""
    from headrace.vmhost.templates import cache_gc

    environment = args.settings.environment
    if args.dry_run:
        for entry in cache_gc.holdings(environment):
            verdict, why = ("keep", entry.why) if entry.why else ("drop", "nothing refers to it")
            say(f"{verdict} {entry.mib:8.1f} MiB  {entry.what:<28} {why}")
        return 0
    removed = cache_gc.collect(environment, tuple(args.forget))
    for entry in removed:
        say(f"gone {entry.mib:8.1f} MiB  {entry.what:<28} {Path(entry.path).name}")
    say(f"{sum(entry.mib for entry in removed):.1f} MiB freed")
    return 0


NOT_SERVED = ("semantic_search", "finish")
"""Default tools that need a run: one needs its search actor, the other ends an episode."""
TOOLS = (*(name for name in DEFAULT_TOOLS if name not in NOT_SERVED), "keyword_search")


def _add_mcp(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("serve", help="serve the tools over standard input and output to an agent")
    add_sandbox(parser)
    parser.add_argument("--pull", default="", metavar="TAR", help="write the workspace to an archive afterwards")
    parser.add_argument("--tools", nargs="+", default=TOOLS, metavar="TOOL", help="tools to serve")
    parser.add_argument(
        "--tests", nargs="*", default=(), metavar="PATH", help="paths that the tool run_tests passes to pytest"
    )
    parser.set_defaults(handler=serve)


async def serve(args: argparse.Namespace) -> int:
    """Serve until the client closes the streams."""
    from headrace.harness.mcp import serve as mcp
    from headrace.harness.tools.registry import schemas_of
    from headrace.registry import PluginError, admit
    from headrace.vmhost.errors import VmhostError

    if importlib.util.find_spec("mcp") is None:
        raise VmhostError("headrace mcp serve needs the package mcp: pip install 'headrace[mcp]'")
    try:
        admit("tools", args.tools)
        schemas_of(tuple(args.tools))
    except PluginError as error:
        raise ConfigError(f"--tools: {error}") from None
    async with fresh(args.settings, args.template, args.push) as (_, sandbox):
        await mcp.serve(sandbox, args.tools, TestPlan(kind="pytest", paths=tuple(args.tests)))
        await pull(sandbox, args.pull)
    return 0
