"""Names to actor classes, loaded only when asked for, and the process that runs them."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.cli import ACTORS
from headrace.config import Config
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.bus.actor import Actor


def load_class(name: str) -> "type[Actor]":
    """The class of an actor: module headrace.actors.<name>, class <Name> in camel case."""
    if name not in ACTORS:
        raise RunError(f"there is no actor {name!r}; there are {', '.join(ACTORS)}")
    module = importlib.import_module(f"headrace.actors.{name}")
    found: type[Actor] = getattr(module, "".join(part.capitalize() for part in name.split("_")))
    return found


def serve(config: Config, names: Sequence[str], run: str, url: str, credentials: str) -> int:
    """Run actors in this process until SIGTERM; the exit code says how it ended."""
    import uvloop

    from headrace.bus.connection import Bus
    from headrace.bus.supervisor import run_actors

    run = run or config.run.id
    url = url or config.bus.url
    if not run:
        raise RunError("an actor needs a run: --run ID, or [run] id in the configuration")
    if not url:
        raise RunError("an actor needs a broker: --url nats://host:port, or [bus] url in the configuration")
    keys = credentials or config.bus.credentials or None
    classes = [(load_class(name.partition(":")[0]), name.partition(":")[2]) for name in names]
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, id=run))

    async def main() -> int:
        # Once before anything starts: a wrong address or key is one sentence, not a restart loop.
        await (await Bus.connect(url, role=classes[0][0].role, credentials=keys)).close()
        return await run_actors(classes, config, run, url=url, credentials=keys)

    return uvloop.run(main())
