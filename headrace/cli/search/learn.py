"""`headrace search learn`: learns an adapter of semantic search from recorded runs and measures it."""

import argparse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import RUN_HELP, add_plugins
from headrace.launch.output import say_report
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.messages.rollout import Trajectory
    from headrace.search.adapters.traces import Traces
    from headrace.search.models import SearchModel


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("learn", help="learn an adapter from the searches and edits of runs, and measure it")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="file to write; must be new")
    add_plugins(parser)
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Read the runs, learn, write the file, and print its figures as one JSON line."""
    import msgspec

    from headrace.launch.session import looped
    from headrace.search.adapters.adapter import AdapterError
    from headrace.search.adapters.learning import learn
    from headrace.search.adapters.traces import Traces
    from headrace.search.models import SearchModelError
    from headrace.search.service import open_indexes

    if args.out.exists():
        raise RunError(f"{args.out} exists: expected a new file", 2)
    traces = Traces()

    async def collect() -> int:
        for name in args.runs:
            await read(name, traces)
        return 0

    looped(collect())
    try:
        model, tokens, cache = model_of(args.runs)
        adapter = learn(*traces.split(), open_indexes(model, tokens, cache))
    except (AdapterError, SearchModelError) as error:
        raise RunError(str(error), 1) from None
    args.out.write_bytes(msgspec.msgpack.encode(adapter))
    say_report(adapter.figures)
    return 0


def model_of(names: list[str]) -> "tuple[SearchModel, int, Path]":
    """The embedding model of the runs, the tokens of a chunk, and the folder of cached vectors. RunError,
    SearchModelError."""
    from headrace.config import load
    from headrace.launch import runs
    from headrace.search.models import INSTALL, find

    models = []
    for name in names:
        config = load(runs.find(name).config)
        models.append((find(config.search.model), config.search.tokens, Path(config.environment.cache_dir) / "search"))
    model, tokens, cache = models[0]
    if model is None:
        raise RunError(f"the runs have no embedding model: {INSTALL}, or set [search] model to a folder", 1)
    if any((other, length) != (model, tokens) for other, length, _ in models):
        raise RunError("the runs search with several models; learn an adapter for each", 1)
    return model, tokens, cache


async def read(name: str, traces: "Traces") -> None:
    """Add the passed attempts of a run."""
    from headrace.config import load
    from headrace.launch import runs
    from headrace.launch.session import bus_of
    from headrace.tasks import UnknownSuite, open_suite

    folder = runs.find(name)
    config = load(folder.config)
    async with bus_of(folder, "replay") as bus:
        async for trajectory in passed(bus, folder.id):
            try:
                task = open_suite(trajectory.task.suite, config.tasks.dir).task(trajectory.task.task)
            except UnknownSuite as error:
                raise RunError(str(error), 1) from None
            traces.add(trajectory, task)


async def passed(bus: "Bus", run: str) -> "AsyncIterator[Trajectory]":
    """The attempts of closed training groups that passed, in their order; purged records are left out."""
    from headrace.replay.fetching import fetch
    from headrace.replay.rejudge import closings

    for group in await closings(bus, run):
        trajectories, scores = await fetch(bus, [group])
        for trajectory_seq, score_seq in group.slots:
            trajectory, score = trajectories.get(trajectory_seq), scores.get(score_seq)
            if trajectory is not None and score is not None and score.passed:
                yield trajectory
