"""`headrace weights log`: the versions that a run published, rebuilt and compared from the stream.

`Chain` is the session with them, which `headrace export` uses too.
"""

import argparse
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.cli.arguments import add_run, group, integer
from headrace.config import Weights, load
from headrace.launch.output import complain, say
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


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version`."""
    parser.add_argument("--version", type=int, default=-1, help="version number; default: the newest")


async def with_chain(command: Callable[["Chain", argparse.Namespace], Awaitable[int]], args: argparse.Namespace) -> int:
    """Open the run and run the command. RunError, code 1, for a version that is missing or not trusted."""
    from headrace.launch import runs
    from headrace.launch.session import bus_of, run_of
    from headrace.weights.signing import Trust
    from headrace.weights.state import WeightError

    elsewhere = getattr(args, "config", "")
    async with AsyncExitStack() as closing:
        if elsewhere:
            run = await closing.enter_async_context(run_of("", elsewhere))
            if run.id != args.run:
                raise RunError(f"{elsewhere} is about run {run.id}, not {args.run}: name that one")
            config = load(elsewhere)
            folder, bus, section = RunDir(Path(config.run.dir) / run.id), run.bus, config.weights
        else:
            folder = runs.find(args.run)
            bus = await closing.enter_async_context(bus_of(folder))
            section = load(folder.config).weights if folder.config.is_file() else Weights()
        try:
            trust = Trust.load(bus.credentials, section.publishers, unsigned=section.unsigned or args.unsigned)
            return await command(Chain(bus, folder, trust, snapshots_of(folder, section)), args)
        except (WeightError, LookupError) as error:
            raise RunError(str(error), 1) from None


def snapshots_of(folder: RunDir, section: Weights) -> "FullSnapshots":
    """The full snapshots of a run, at the location that its configuration names."""
    from headrace.weights.full.location import Location
    from headrace.weights.full.snapshots import FullSnapshots

    async def tell(text: str) -> None:
        complain(text)

    return FullSnapshots(Location.of_run(section, folder.path), None, tell)


def add(commands: "Commands") -> None:
    """Declare the command of the group."""
    subcommands = group(commands, "weights", "the chain of published weight versions")
    parser = subcommands.add_parser("log", help="print a line per version, one in full, or what changed between two")
    add_run(parser)
    parser.add_argument("--version", type=int, metavar="N", help="print this version in full; -1 is the newest")
    parser.add_argument("--since", type=int, metavar="M", help="with --version: print what changed since version M")
    parser.add_argument(
        "--verify", action="store_true", help="rebuild the chain, or with --version one version; check every hash"
    )
    parser.add_argument(
        "--collect",
        type=integer(2),
        metavar="CHAINS",
        help="remove the versions that no receiver needs any more: keep this many newest chains",
    )
    parser.add_argument("--unsigned", action="store_true", help="accept versions without a signature")
    parser.set_defaults(handler=lambda args: with_chain(log, args))


async def log(chain: Chain, args: argparse.Namespace) -> int:
    """Print the versions; 1 when a hash or a signature is wrong."""
    from headrace.weights import report

    if args.collect is not None:
        return await collect(chain, args.collect)
    if args.since is not None and (args.version is None or args.verify):
        raise RunError("--since compares two versions: it needs --version, and no --verify", 2)
    if args.verify:
        return await verify(chain, -1 if args.version is None else args.version)
    if args.since is not None:
        return await diff(chain, args.since, args.version)
    if args.version is None:
        say(await report.log(chain.bus, chain.folder.id))
    else:
        say(await report.show(chain.bus, chain.folder.id, args.version))
    return 0


async def verify(chain: Chain, version: int) -> int:
    """Print what was verified; 1 when a hash or a signature is wrong."""
    from headrace.weights import report

    if version < 0:
        good, text = await report.verify_all(chain.bus, chain.folder.id, chain.trust, chain.snapshots.fetch)
    else:
        good, text = await report.verify(
            chain.bus, chain.folder.id, version, trust=chain.trust, fetch=chain.snapshots.fetch
        )
    if not good:
        for line in text.splitlines():
            complain(line)
        return 1
    say(text)
    return 0


async def diff(chain: Chain, older: int, newer: int) -> int:
    """Rebuild both versions and print the differences."""
    from headrace.weights import chain as chains
    from headrace.weights import report
    from headrace.weights.snapshot import Snapshot

    run = chain.folder.id
    with tempfile.TemporaryDirectory(prefix="headrace-diff-") as text:
        files: list[Path] = []
        for version in (older, newer):
            head = await report.commit_of(chain.bus, run, version)
            files.append(Path(text) / f"{len(files)}.safetensors")
            await chains.obtain(
                chain.bus,
                head,
                files[-1],
                lambda version, state_hash: None,
                trust=chain.trust,
                fetch=chain.snapshots.fetch,
            )
        say(f"version {older} to version {newer} of run {run}: " + report.diff(*map(Snapshot, files)))
    return 0


async def collect(chain: Chain, chains: int) -> int:
    """Purge versions, with the role trainer: the only one that may. Print what was removed."""
    from headrace.bus.connection import Bus
    from headrace.bus.payloads import retention
    from headrace.weights.chain import STREAM
    from headrace.weights.full import retention as full
    from headrace.weights.publishing import collect as collecting

    bus, run = chain.bus, chain.folder.id
    pins = await collecting.pinned(bus, run)
    async with await Bus.connect(bus.connection.url, role="trainer", credentials=bus.credentials) as trainer:
        gone = await collecting.collect(
            bus,
            lambda subject: trainer.purge(STREAM, subject=subject),
            run,
            chains=chains,
            pins=pins,
            trust=chain.trust,
            purge_manifests=lambda subject: retention.purge_all(trainer, STREAM, subject),
        )
    location = chain.snapshots.location
    if objects := await full.sweep(bus, run, location):
        say(f"removed {len(objects)} full snapshots at {location.url}: {', '.join(objects)}")
    if gone:
        say(f"removed {len(gone)} versions, {min(gone)} to {max(gone)}, and {sum(gone.values())} messages")
    else:
        say(f"nothing to remove: the newest {chains} chains and the pinned versions need every version")
    return 0
