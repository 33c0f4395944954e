"""`headrace dashboard`: serves the live page of a run, also of a finished run and of a run on other machines."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_run, integer

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("dashboard", help="serve the live page of a run")
    add_run(parser)
    parser.add_argument("--port", type=integer(0), default=None, help="HTTP port; default: [dashboard] port")
    parser.add_argument(
        "--users",
        type=integer(1),
        metavar="MINUTES",
        help="also print an address with users' sessions, valid for MINUTES",
    )
    parser.set_defaults(handler=dashboard)


def dashboard(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import asyncio
    from contextlib import AsyncExitStack
    from pathlib import Path

    from headrace.bus.broker.credentials import of_run
    from headrace.bus.broker.server import Server, running
    from headrace.bus.connection import Bus
    from headrace.config import Config, load
    from headrace.dashboard.live.server import Address
    from headrace.launch import runs
    from headrace.launch.output import say
    from headrace.launch.page import read_place, serving, websocket_of
    from headrace.launch.runs import RunError
    from headrace.launch.session import looped

    folder = runs.find(args.run)
    config = load(folder.config) if folder.config.is_file() else Config()

    async def body() -> int:
        async with AsyncExitStack() as closing:
            port = config.dashboard.port if args.port is None else args.port
            url, credentials, broker_websocket = config.bus.url, of_run(config.bus.credentials, folder.id), ""
            active = None if url else running(folder.broker)
            if active is not None:
                live = read_place(folder.path)
                if live is None:
                    raise RunError(
                        f"{folder.id} runs with [dashboard] enabled = false; start it again with enabled = true"
                    )
                say(f"{folder.id}: {live.page}")
                if args.users:
                    say(f"with users' sessions: {live.page}?token={live.token}, for 12 hours from the run's start")
                return 0
            address = Address(config.dashboard.host, port)
            if not url:
                server = Server(folder.broker, need_free=0, origins=address.origins)
                await closing.enter_async_context(await server.start())
                url, credentials = server.url, str(folder.broker / "credentials")
                broker_websocket = server.websocket
            bus = await closing.enter_async_context(
                await Bus.connect(url, role="dashboard", credentials=Path(credentials) if credentials else None)
            )
            websocket = websocket_of(config, broker_websocket)
            page = await closing.enter_async_context(serving(config, folder.id, bus, address, websocket, credentials))
            say(f"{folder.id}: {address.url}")
            if args.users:
                token = page.access.token(60 * args.users)
                say(f"with users' sessions for {args.users} minutes: {address.url}?token={token}")
            await asyncio.Event().wait()
        return 0

    return looped(body())
