"""Runs one or several actors in this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.actors.registry import load_class
from headrace.config import Config
from headrace.garbage import uncollected
from headrace.launch.runs import RunError
from headrace.launch.supervision.notify import ready


@contextmanager
def measured(config: Config, name: str, run: str) -> Iterator[None]:
    """Serve this process's metrics while the block runs, if [metrics] enables them. PortTaken, SecretError."""
    if not config.metrics.enabled:
        yield
        return
    from headrace.metrics.exposition import Exposition, key_of

    section, runs = config.metrics, Path(config.run.dir)
    targets = runs / run / "targets"
    try:
        key = key_of(section.key, runs)
        exposition = Exposition(section.host, section.port, key, targets, name, {"run": run})
    except OSError as error:
        raise RunError(f"cannot write {targets}: {error.strerror}", 3) from None
    try:
        yield
    finally:
        exposition.close()


def serve(config: Config, names: Sequence[str], run: str, url: str, credentials: str) -> int:
    """Run actors until SIGTERM; return the exit code."""
    import uvloop

    from headrace.bus.broker.credentials import of_run
    from headrace.bus.connection import Bus
    from headrace.bus.nats import streams
    from headrace.bus.runtime.supervisor import run_actors

    run = run or config.run.id
    url = url or config.bus.url
    if not run:
        raise RunError("an actor needs a run: --run ID, or [run] id in the configuration")
    if not url:
        raise RunError("an actor needs a broker: --url nats://host:port, or [bus] url in the configuration")
    keys = of_run(credentials or config.bus.credentials, run) or None
    try:
        with uncollected():
            classes = [(load_class(name.partition(":")[0]), name.partition(":")[2]) for name in names]
    except LookupError as error:
        raise RunError(str(error.args[0])) from None
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, id=run))

    async def main() -> int:
        # Checked once before anything starts: a wrong address or key, or a missing stream, is one sentence, not a
        # restart loop.
        async with await Bus.connect(url, role=classes[0][0].role, credentials=keys) as bus:
            await streams.require(bus.connection)
        with measured(config, names[0].replace(":", "-"), run):
            async with ready():
                return await run_actors(classes, config, run, url=url, credentials=keys)

    return uvloop.run(main())
