"""The session of a `headrace weights` command: a connection with the command's role, and the keys that it trusts."""

import argparse
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.cli.arguments import add_run
from headrace.config import Weights, load
from headrace.launch.runs import RunDir, RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.weights.full.snapshots import FullSnapshots
    from headrace.weights.signing import Trust


class Chain(NamedTuple):
    """The published versions of one run."""

    bus: "Bus"
    folder: RunDir
    trust: "Trust"
    snapshots: "FullSnapshots"


Command = Callable[[Chain, argparse.Namespace], Awaitable[int]]


def declare(
    commands: "Commands", name: str, text: str, command: Command, role: str = "operator"
) -> argparse.ArgumentParser:
    """Declare a subcommand that runs with a role on the run's broker; its own arguments are added by the caller."""
    parser = commands.add_parser(name, help=text)
    parser.set_defaults(handler=lambda args: execute(command, args, role))
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """The run and `--unsigned`; call it after the positional arguments that precede the run."""
    add_run(parser)
    parser.add_argument("--unsigned", action="store_true", help="accept versions without a signature")


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version`."""
    parser.add_argument("--version", type=int, default=-1, help="version number; default: the newest")


def execute(command: Command, args: argparse.Namespace, role: str) -> int:
    """Open the run and run the command. RunError, code 1, for a version that is missing or not trusted."""
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped, run_of
    from headrace.weights.signing import Trust
    from headrace.weights.state import WeightError

    async def body() -> int:
        elsewhere = getattr(args, "config", "")
        async with AsyncExitStack() as closing:
            if elsewhere:
                run = await closing.enter_async_context(run_of("", elsewhere, role))
                if run.id != args.run:
                    raise RunError(f"{elsewhere} is about run {run.id}, not {args.run}: name that one")
                config = load(elsewhere)
                folder, bus, section = RunDir(Path(config.run.dir) / run.id), run.bus, config.weights
            else:
                folder = runs.find(args.run)
                bus = await closing.enter_async_context(bus_of(folder, role))
                section = load(folder.config).weights if folder.config.is_file() else Weights()
            try:
                trust = Trust.load(bus.credentials, section.publishers, unsigned=section.unsigned or args.unsigned)
                return await command(Chain(bus, folder, trust, snapshots_of(folder, section)), args)
            except (WeightError, LookupError) as error:
                raise RunError(str(error), 1) from None

    return looped(body())


def snapshots_of(folder: RunDir, section: Weights) -> "FullSnapshots":
    """The full snapshots of a run, at the location that its configuration names."""
    from headrace.launch.output import complain
    from headrace.weights.full.location import Location
    from headrace.weights.full.snapshots import FullSnapshots

    async def tell(text: str) -> None:
        complain(text)

    return FullSnapshots(Location.of_run(section, folder.path), None, tell)
