"""`headrace tasks atif`: writes the trajectories of a run as ATIF 1.7 documents, one per line."""

import argparse
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_plugins, add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.messages.judging import Score
    from headrace.tasks.exporting.atif import Decode


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("atif", help="write a run's trajectories as ATIF 1.7, one per line")
    add_run(parser, optional=False)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    add_plugins(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Write the file; 1 if no trajectory of the run is stored."""
    from headrace.launch.session import looped

    return looped(write(args))


async def write(args: argparse.Namespace) -> int:
    """Run the command on the event loop."""
    from headrace import __version__
    from headrace.cli.tasks.attempts import attempts
    from headrace.config import load
    from headrace.launch import runs
    from headrace.launch.session import bus_of
    from headrace.tasks import UnknownSuite
    from headrace.tasks.exporting.atif import trajectory

    folder = runs.find(args.run)
    count = 0
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_of(folder, "replay"))
        decode, scores = await _decoder(bus, folder.id), await _scores(bus, folder.id)
        file = stack.enter_context(args.file.open("w", encoding="utf-8"))
        try:
            async for attempt in attempts(bus, folder.id, load(folder.config).tasks.dir):
                score = scores.get(attempt.seq)
                document = trajectory(attempt.made, attempt.task, decode, score, __version__, attempt.policy)
                file.write(json.dumps(document, ensure_ascii=False) + "\n")
                count += 1
        except UnknownSuite as error:
            raise RunError(str(error)) from None
    say(f"{count} trajectories in {args.file}")
    return 0 if count else 1


async def _decoder(bus: "Bus", run: str) -> "Decode":
    """The run's tokenizer; in a run with only scripted policies, a tokenizer of tags and single bytes."""
    from headrace.bus.payloads import renderer_bundles
    from headrace.rendering.schemas import tags
    from headrace.rendering.tokenizer import Tokenizer

    bundle = await renderer_bundles.fetch(bus, run)
    tokenizer = Tokenizer.train((), 256 + len(tags())) if bundle is None else Tokenizer.parse(bundle.tokenizer_json)
    return tokenizer.decode


async def _scores(bus: "Bus", run: str) -> "dict[int, Score]":
    """The scores of a run by the sequence of their trajectory."""
    from headrace.messages.judging import Score
    from headrace.messages.subjects import SCORE

    scores: dict[int, Score] = {}
    async for received in bus.history("HR_SCORE", SCORE.where(run=run)):
        if isinstance(score := received.message, Score):
            scores[score.trajectory_seq] = score
    return scores
