"""`headrace dashboard`: serves the live page of a run, of this machine or of any that reaches its broker."""

import argparse
import asyncio
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_elsewhere, add_plugins, add_run, add_set, integer
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.dashboard.live.server import Address
    from headrace.launch.supervision.signals import Stopping


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("dashboard", help="serve the live page of a run")
    add_run(parser)
    add_elsewhere(parser)
    add_set(parser)
    parser.add_argument("--host", default="", help="address at which the page listens; default: [dashboard] host")
    parser.add_argument("--port", type=integer(0), default=None, help="HTTP port; default: [dashboard] port")
    parser.add_argument(
        "--users",
        type=integer(1),
        metavar="MINUTES",
        help="also print an address with users' sessions, valid for MINUTES",
    )
    add_plugins(parser)
    parser.set_defaults(handler=dashboard)


def dashboard(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import uvloop

    from headrace.launch.supervision.signals import interruptible

    async def body(stopping: "Stopping", closing: "AsyncExitStack") -> int:
        stopping.effect = "the page is closed"
        return await (_elsewhere if args.config else _here)(args, closing)

    return uvloop.run(interruptible(body))


async def _here(args: argparse.Namespace, closing: "AsyncExitStack") -> int:
    """The page of a run with a folder on this machine."""
    from headrace.bus.broker.credentials import of_run
    from headrace.bus.broker.server import Server, running
    from headrace.config import Config, load
    from headrace.dashboard.live.server import Address
    from headrace.launch import runs
    from headrace.launch.page import opened, read_place, websocket_of

    folder = runs.find(args.run)
    config = load(folder.config, args.set) if folder.config.is_file() else Config()
    url, credentials, websocket = config.bus.url, of_run(config.bus.credentials, folder.id), ""
    if not url and running(folder.broker) is not None:
        live = read_place(folder.path)
        if live is None:
            raise RunError(f"{folder.id} runs with [dashboard] enabled = false; start it again with enabled = true")
        say(f"{folder.id}: {opened(live.page, live.key)}")
        if args.users:
            say(f"with users' sessions for {args.users} minutes: {live.users(args.users)}")
        return 0
    address = Address(args.host or config.dashboard.host, config.dashboard.port if args.port is None else args.port)
    if not url:
        server = Server(folder.broker, need_free=0, origins=address.origins)
        await closing.enter_async_context(await server.start())
        url, credentials, websocket = server.url, str(folder.broker / "credentials"), server.websocket
    return await _serve(args, closing, config, folder.id, address, url, credentials, websocket_of(config, websocket))


async def _elsewhere(args: argparse.Namespace, closing: "AsyncExitStack") -> int:
    """The page of a launched or deployed run, whose broker admits only the ports of `launch.site`."""
    from pathlib import Path

    from headrace.bus.broker.credentials import of_run
    from headrace.config import ConfigError
    from headrace.dashboard.live.server import Address
    from headrace.launch.admission import own
    from headrace.launch.site import site_of

    config = own(args.config, args.set)
    for key, value in (("run.id", config.run.id), ("bus.url", config.bus.url)):
        if not value:
            raise ConfigError(f"{args.config}: {key}: the page finds the run and its broker by it; set {key}")
    site = site_of(config)
    if site is None:
        raise ConfigError(f"{args.config}: dashboard.enabled is false, so the broker admits no page; set it to true")
    credentials = of_run(config.bus.credentials, config.run.id)
    port = site.port if args.port is None else args.port
    address = Address(args.host or site.host, port, site.context(Path(credentials), args.host))
    return await _serve(args, closing, config, config.run.id, address, config.bus.url, credentials, site.websocket)


async def _serve(
    args: argparse.Namespace,
    closing: "AsyncExitStack",
    config: "Config",
    run: str,
    address: "Address",
    url: str,
    credentials: str,
    websocket: str,
) -> int:
    """Serve the page until the command is interrupted."""
    import sys
    from pathlib import Path

    from headrace.bus.connection import Bus
    from headrace.launch.page import opened, serving, write_place
    from headrace.launch.supervision.notify import ready

    bus = await closing.enter_async_context(await Bus.connect(url, role="dashboard", credentials=credentials or None))
    page = await closing.enter_async_context(serving(config, run, bus, address, websocket, credentials))
    folder = Path(config.run.dir) / run
    token = page.access.token(60 * args.users) if args.users else ""
    try:
        write_place(folder, address.url, page.access, token)
    except OSError as error:
        raise RunError(f"the page's key cannot be written to {folder}/page.json: {error.strerror}", 3) from None
    closing.callback((folder / "page.json").unlink, missing_ok=True)
    if not sys.stdout.isatty():  # the journal of a service
        say(f"{run}: {address.url}, its key is in {folder}/page.json")
    else:
        say(f"{run}: {opened(address.url, page.access.key)}")
        if token:
            say(f"with users' sessions for {args.users} minutes: {opened(address.url, token)}")
    async with ready():
        await asyncio.Event().wait()
    return 0
