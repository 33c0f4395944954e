"""Sandboxes by hand: `headrace vm shell | run | fork | pool`.

Each opens a host of its own, takes what it needs and leaves nothing behind. What a command prints comes as it prints
it, by the same calls that an agent's tools use.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import Config
from headrace.launch.output import say
from headrace.messages.sandbox import (
    Acquire,
    Exec,
    FeedJob,
    FollowJob,
    OpResult,
    PullTar,
    PushTar,
    Sandbox,
    StartJob,
    StopJob,
)
from headrace.vmhost import image, levels
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.host import Host, VmSandbox


def request(template: str, slot: int = 0, group: str = "hand") -> Acquire:
    """A sandbox with a machine of its own."""
    names = {"run": "hand", "lane": "eval", "group": group, "template": template}
    return Acquire(**names, role="rollout", slot=slot, attempt=0, isolation="episode")  # type: ignore[arg-type]


def _tell(kind: str, text: str, data: dict[str, Any]) -> None:
    """What takes long is told beside the command's own output; what fails, its error tells."""
    if kind == "vm_template":
        sys.stderr.write(f"headrace: {text}\n")


@asynccontextmanager
async def fresh(
    config: Config, template: str, push: str = "", **changes: object
) -> AsyncIterator[tuple[Host, VmSandbox]]:
    """A host with one sandbox, a folder's content in its workspace."""
    environment = msgspec.structs.replace(config.environment, warm=0, **changes)
    if environment.backend != "process":
        image.plan(environment, template)  # an unknown one is told before anything is made
    tree = levels.archive(Path(push)) if push else b""
    host = await Host.open(environment, on_event=_tell)
    try:
        sandbox = await host.acquire(request(template))
        if push:
            pushed = await sandbox.call(PushTar(data=tree))
            if not pushed.ok:
                raise VmhostError(f"{push} could not be pushed: {pushed.error}")
        yield host, sandbox
    finally:
        await host.close()


async def run(config: Config, args: argparse.Namespace) -> int:
    """A command, streamed; its exit code is ours."""
    argv = tuple(args.argv) or _own_command(config, args.template)
    async with fresh(config, args.template, args.push) as (_, sandbox):
        started = await sandbox.call(StartJob(argv=argv, env=dict(args.env), user=args.user, timeout_s=args.timeout))
        code = await _follow(sandbox, started)
        if args.pull:
            pulled = await sandbox.call(PullTar())
            if not pulled.ok:
                raise VmhostError(f"the workspace could not be pulled: {pulled.error}")
            Path(args.pull).write_bytes(pulled.data)
    return code


async def shell(config: Config, args: argparse.Namespace) -> int:
    """A terminal: what is typed goes in, what comes out is shown, until the shell ends."""
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
            return await _follow(sandbox, started)
        finally:
            feeder.cancel()
            os.set_blocking(fd, True)
            if raw:
                termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _feed(sandbox: Sandbox, job: int, fd: int) -> None:
    """Typed bytes to a job, until there are no more."""
    reader = asyncio.StreamReader()
    with os.fdopen(os.dup(fd), "rb", buffering=0) as typed:
        try:
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), typed)
            read: Callable[[int], Awaitable[bytes]] = reader.read
        except (ValueError, OSError):  # a regular file can't be waited for
            read = partial(asyncio.to_thread, typed.read)
        while data := await read(4096):
            await sandbox.call(FeedJob(job=job, data=data))
        await sandbox.call(FeedJob(job=job, last=True))


async def _follow(sandbox: Sandbox, started: OpResult) -> int:
    """Show a job's output as it comes; its exit code. Ctrl-C goes to the job; the second one ends it."""
    if not started.ok:
        raise VmhostError(f"the command could not be started: {started.error}")
    loop, heard = asyncio.get_running_loop(), 0
    presses: list[float] = []
    with suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, lambda: presses.append(time.monotonic()))
    try:
        while True:
            piece = asyncio.ensure_future(sandbox.call(FollowJob(job=started.job, wait_s=1.0)))
            await asyncio.wait([piece])
            told = piece.result()
            for stream, text in ((sys.stdout, told.stdout), (sys.stderr, told.stderr)):
                try:
                    stream.write(text)
                    stream.flush()
                except BrokenPipeError:  # who read it is gone (`| head`): the job hears it as it would in a pipe
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    await sandbox.call(StopJob(job=started.job, signal=signal.SIGPIPE))
            if len(presses) > heard:
                heard = len(presses)
                end = signal.SIGINT if heard == 1 else signal.SIGKILL
                await sandbox.call(StopJob(job=started.job, signal=end))
            if not told.running:
                if told.timed_out:
                    raise VmhostError(told.error)
                return told.code if told.code >= 0 else 128 - told.code
    finally:
        with suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


def _own_command(config: Config, template: str) -> tuple[str, ...]:
    plan = image.plan(config.environment, template)
    while plan.below is not None:
        plan = plan.below
    own = (*plan.image.entrypoint, *plan.image.cmd) if plan.image else ()
    if not own:
        raise VmhostError(f"{template} has no command of its own: say one after --")
    return own


async def fork(config: Config, args: argparse.Namespace) -> int:
    """A sandbox, prepared, forked while it runs; the command in each fork; a JSON line."""
    count = args.count
    async with fresh(config, args.template, args.push, max_vms=count + 3, judge_share=0) as (host, sandbox):
        if args.prepare:
            done = await sandbox.call(Exec(argv=("sh", "-c", args.prepare), user=args.user, timeout_s=3600.0))
            if not done.ok:
                raise VmhostError(f"the preparation failed: {done.error}: {(done.stdout + done.stderr)[-500:].strip()}")
        started = time.perf_counter()
        forks = await host.fork(sandbox.id, [request(args.template, 1 + slot) for slot in range(count)])
        took = time.perf_counter() - started
        argv = tuple(args.argv) or ("true",)
        done_in = await asyncio.gather(*(one.call(Exec(argv=argv, user=args.user, timeout_s=3600.0)) for one in forks))
        for number, result in enumerate(done_in):
            for line in (result.stdout + result.stderr).splitlines():
                say(f"{number}: {line}")
        codes = [result.code for result in done_in]
        say(json.dumps({"forks": count, "fork_wall_ms": round(took * 1000, 1), "codes": codes}))
    return 0 if not any(codes) else 1


async def pool(config: Config, args: argparse.Namespace) -> int:
    """Warm clones of a template, acquired one after another; a JSON line."""
    from headrace.vmhost import figures

    image.plan(config.environment, args.template)
    changes = {"warm": args.clones, "max_vms": args.clones + 2, "judge_share": 0, "production_share": 0}
    environment = msgspec.structs.replace(config.environment, **changes)
    warm = await figures.warm(environment, args.template, args.clones)
    cold = await figures.on_demand(environment, args.template, args.clones)
    told = {
        "template": args.template,
        "clones": args.clones,
        "warm_acquire_p50_ms": round(statistics.median(one.wall_ms for one in warm), 2),
        "cold_acquire_p50_ms": round(statistics.median(one.wall_ms for one in cold), 2),
        "parked_private_p50_mib": round(statistics.median(one.private_mib for one in warm), 2),
    }
    say(json.dumps(told))
    return 0
