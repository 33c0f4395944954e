"""`headrace vm shell`: an interactive terminal in a fresh sandbox."""

import argparse
import asyncio
import os
import sys
import termios
import tty
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.cli.vm.session import add_sandbox, declare, follow, fresh
from headrace.config import Config

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.messages.sandbox import Sandbox


def add(commands: "Commands") -> None:
    """Declare the command."""
    add_sandbox(declare(commands, "shell", "open a terminal in a fresh sandbox", shell))


async def shell(config: Config, args: argparse.Namespace) -> int:
    """Forward input and output until the shell ends; return its exit code."""
    from headrace.messages.sandbox import StartJob

    fd = sys.stdin.fileno()
    raw = os.isatty(fd)
    async with fresh(config, args.template, args.push) as (_, sandbox):
        env = {"TERM": os.environ.get("TERM", "dumb"), "PS1": f"{args.template}:\\w$ "}
        job = StartJob(argv=("sh", "-i"), terminal=True, env=env, user=args.user, timeout_s=86400.0)
        started = await sandbox.call(job)
        before = termios.tcgetattr(fd) if raw else []
        if raw:
            tty.setraw(fd)
        feeder = asyncio.create_task(_feed(sandbox, started.job, fd))
        try:
            return await follow(sandbox, started)
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
