"""`headrace search publish` and `headrace search withdraw`: begin or end the use of an adapter in a run's searches."""

import argparse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import RUN_HELP, add_run
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.connection import Bus
    from headrace.cli.arguments import Commands
    from headrace.messages.search import SearchAdapter


def add(commands: "Commands") -> None:
    """Declare the commands."""
    parser = commands.add_parser("publish", help="use an adapter for a run's searches; it must have a measured gain")
    parser.add_argument("file", type=Path, metavar="FILE", help="written by `headrace search learn`")
    parser.add_argument("--run", required=True, metavar="RUN", help=RUN_HELP)
    parser.set_defaults(handler=publish)
    parser = commands.add_parser("withdraw", help="use the adapter before the current one again, or none")
    add_run(parser, optional=False)
    parser.set_defaults(handler=withdraw)


def publish(args: argparse.Namespace) -> int:
    """Publish the adapter of a file as the newest version."""
    from headrace.search.adapters import versions
    from headrace.search.adapters.adapter import gain_of

    adapter = read(args.file)

    async def body(bus: "Bus", run: str) -> None:
        await versions.publish(bus, run, adapter)
        say(f"searches of run {run} use adapter {adapter.hash}: {gain_of(adapter.figures)}")

    return _on(args.run, body)


def withdraw(args: argparse.Namespace) -> int:
    """Withdraw the newest version."""
    from headrace.search.adapters import versions

    async def body(bus: "Bus", run: str) -> None:
        version = await versions.withdraw(bus, run)
        say(f"searches of run {run} no longer use adapter {version.hash}")

    return _on(args.run, body)


def read(file: Path) -> "SearchAdapter":
    """The adapter of a file. RunError when it holds none."""
    import msgspec

    from headrace.messages.search import SearchAdapter

    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=SearchAdapter)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{file}: expected a file of `headrace search learn`: {error}") from None


def _on(run: str, body: "Callable[[Bus, str], Awaitable[None]]") -> int:
    from headrace.launch import runs
    from headrace.launch.session import bus_of, looped
    from headrace.search.adapters.adapter import AdapterError

    async def main() -> int:
        folder = runs.find(run)
        async with bus_of(folder) as bus:
            try:
                await body(bus, folder.id)
            except AdapterError as error:
                raise RunError(str(error), 1) from None
        return 0

    return looped(main())
