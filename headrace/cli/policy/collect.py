"""`headrace policy collect`: writes good attempts of a recorded run as data for mid-training, by rejection sampling."""

import argparse
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_run, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
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
    """Write the file under a temporary name, and rename it when it is complete."""
    from headrace.launch.session import looped

    return looped(collect(args))


async def collect(args: argparse.Namespace) -> int:
    """Run the command on the event loop."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.launch.session import run_of

    target = Path(args.file)
    if target.exists():
        raise RunError(f"{target} exists: expected a new file", 2)
    part = target.with_name(f".{target.name}.part")
    async with run_of(args.run, role="replay") as run:
        bundle = await renderer_bundles.fetch(run.bus, run.id)
        if bundle is None:
            raise RunError(f"run {run.id} has no renderer bundle in HR_RENDERER: its trainer never started", 1)
        count, written = 0, 0
        try:
            with part.open("wb") as file:
                async for lines in attempts(run.bus, run.id, bundle.tokenizer_json, args):
                    file.write(b"".join(lines))
                    count, written = count + 1, written + len(lines)
        except OSError as error:
            raise RunError(f"{target} cannot be written: {error.strerror}", 1) from None
    if not count:
        part.unlink()
        raise RunError(f"run {run.id} has no attempt with a reward of at least {args.reward:g}: lower --reward", 1)
    os.replace(part, target)
    say(f"{target}: {count} attempts of run {run.id}, {written} segments")
    return 0


async def attempts(bus: "Bus", run: str, tokenizer_json: str, args: argparse.Namespace) -> AsyncIterator[list[bytes]]:
    """The lines of each wanted attempt in the order of the closed groups; purged records are left out."""
    from headrace.replay.fetching import fetch
    from headrace.replay.rejudge import closings
    from headrace.training.data.trajectories import segments, tokenizer_hash

    tokenizer, taken = tokenizer_hash(tokenizer_json), Counter[tuple[str, str]]()
    for group in await closings(bus, run):
        trajectories, scores = await fetch(bus, [group])
        for trajectory_seq, score_seq in group.slots:
            trajectory, score = trajectories.get(trajectory_seq), scores.get(score_seq)
            if trajectory is None or score is None or score.reward < args.reward:
                continue
            task = (trajectory.task.suite, trajectory.task.task)
            if taken[task] < args.per_task:
                taken[task] += 1
                yield [msgspec.json.encode(part) + b"\n" for part in segments(trajectory, score.reward, tokenizer)]
