"""`headrace policy collect`: good attempts of a recorded run as data for mid-training, by rejection sampling."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("collect", help="write good attempts of a run as data for mid-training")
    add_run(parser, optional=False)
    parser.add_argument("file", metavar="FILE", help="JSONL file to write; must be new")
    parser.add_argument("--reward", type=float, default=1.0, metavar="R", help="smallest reward (default 1)")
    parser.add_argument(
        "--per-task", type=integer(1), default=4, metavar="N", help="most attempts of a task (default 4)"
    )
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Write the file; it gets its name when it is complete."""
    from headrace.launch.session import looped

    return looped(collect(args))


async def collect(args: argparse.Namespace) -> int:
    """The same on the event loop."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.launch.session import run_of
    from headrace.replay import collecting

    target = Path(args.file)
    if target.exists():
        raise RunError(f"{target} exists: expected a new file", 2)
    part = target.with_name(f".{target.name}.part")
    async with run_of(args.run, role="replay") as run:
        bundle = await renderer_bundles.fetch(run.bus, run.id)
        if bundle is None:
            raise RunError(f"run {run.id} has no renderer bundle in HR_STATE: its trainer never started", 1)
        wanted = collecting.Wanted(reward=args.reward, per_task=args.per_task)
        attempts, segments = 0, 0
        try:
            with part.open("wb") as file:
                async for lines in collecting.attempts(run.bus, run.id, bundle.tokenizer_json, wanted):
                    file.write(b"".join(lines))
                    attempts, segments = attempts + 1, segments + len(lines)
        except OSError as error:
            raise RunError(f"{target} cannot be written: {error.strerror}", 1) from None
    if not attempts:
        part.unlink()
        raise RunError(f"run {run.id} has no attempt with a reward of at least {args.reward:g}: lower --reward", 1)
    os.replace(part, target)
    say(f"{target}: {attempts} attempts of run {run.id}, {segments} segments")
    return 0
