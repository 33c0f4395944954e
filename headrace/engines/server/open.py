"""Opens an engine over servers: attaches to the one at `url`, or starts servers with `python`."""

from collections.abc import Callable
from pathlib import Path

from headrace.engines.registry import EngineSetup
from headrace.engines.server.backend import Backend, IncompatibleServer
from headrace.engines.server.engine import OneServer
from headrace.engines.server.fleet import Fleet
from headrace.engines.server.http import Wire
from headrace.engines.server.options import ServerOptions
from headrace.engines.server.process import Server
from headrace.engines.server.requirements import problems

MakeBackend = Callable[[Wire, Path, int], Backend]
"""A backend over a connection. Its other arguments: the folder of the staged checkpoint, and the most requests."""


async def open_engine(setup: EngineSetup, options: ServerOptions, make: MakeBackend) -> OneServer | Fleet:
    """The engine of a rollout actor. A running server is checked. UnusableEngine, EngineError."""
    await setup.tokenizer()  # the server loads a checkpoint folder, tokenizer included
    engine = opened(setup, options, make)
    if isinstance(engine, OneServer):
        await engine.attach()
    return engine


def opened(setup: EngineSetup, options: ServerOptions, make: MakeBackend) -> OneServer | Fleet:
    """The engine of a rollout actor; servers are started with their first version. IncompatibleServer names the key to
    change."""
    for key, text in problems(setup.section, options):
        raise IncompatibleServer(f"engine.{key}: {text}")
    if options.servers == 1:
        return _engine(setup, options, make, setup.id, next(iter(options.server_devices), None))
    devices = options.server_devices or (None,) * options.servers
    return Fleet([_engine(setup, options, make, f"{setup.id}-{index}", seen) for index, seen in enumerate(devices)])


def _engine(setup: EngineSetup, options: ServerOptions, make: MakeBackend, id: str, devices: str | None) -> OneServer:
    """The engine of one server. devices: the GPUs that it sees; None for all."""
    server = None
    most = -(-setup.section.max_batch // options.servers)
    if options.python:
        log = setup.run / "logs" / f"{setup.section.kind.partition(':')[0]}-{id}.log"
        server = Server(options.python, log, devices=devices)
    folder = setup.versions / "servers" / id
    tokenizer = setup.run / "tokenizer.json"
    return OneServer(
        setup.policy,
        folder,
        make(Wire(server.url if server is not None else options.url), folder, most),
        server=server,
        tokenizer=tokenizer if tokenizer.exists() else None,
        max_batch=most,
        # A server binds a request to the adapter that it began with, so that a swap in place would not change it.
        swap="abort" if setup.policy.adapter else options.swap,
        start_s=options.start_s,
    )
