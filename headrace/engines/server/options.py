"""The keys of `[engine.options]` that every engine over a server has. Imports no torch."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.base import Duration, HttpUrl, OptionalPath


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers, and how they are used."""

    url: HttpUrl = ""
    """Address of a running server. Each rollout actor needs a server of its own."""
    python: OptionalPath = ""
    """Interpreter of the environment that has the server: the actor then starts servers itself."""
    args: tuple[str, ...] = ()
    """Further arguments of a server that is started."""
    servers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Servers that a rollout actor starts, each on a port of its own; they share `engine.max_batch`."""
    server_devices: tuple[str, ...] = ()
    """The GPUs of each server, as in CUDA_VISIBLE_DEVICES: ["0,1", "2,3"] for two servers. Empty: all that the actor
    sees, for one server or for servers on a CPU."""
    swap: Literal["in_place", "abort"] = "in_place"
    """in_place: change weights under running requests. abort: abort them, keep the sampled tokens, and request the rest
    again."""
    start_s: Duration = 600.0
    """Time limit of a server's start."""
