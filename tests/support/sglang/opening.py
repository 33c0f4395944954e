"""Opens an engine over one SGLang server or double, with the options of a configuration as arguments."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config import Engine as Section
from headrace.engines.registry import EngineSetup
from headrace.engines.server import open as server_open
from headrace.engines.server.backend import Ask, Attempt, Terms
from headrace.engines.server.engine import OneServer
from headrace.engines.server.fleet import Fleet
from headrace.engines.server.http import Wire
from headrace.engines.server.process import Server
from headrace.engines.sglang.backend import Sglang
from headrace.engines.sglang.options import SglangOptions
from headrace.engines.sglang.reply import read
from headrace.policy.config import PolicyConfig


def sglang_engine(
    config: PolicyConfig,
    folder: Path,
    *,
    url: str = "",
    server: Server | None = None,
    args: Sequence[str] = (),
    weights: Literal["disk", "tensor", "auto"] = "disk",
    **more: Any,
) -> OneServer:
    """Either `url` or `server` is given. more: of `OneServer`."""
    python = server.python if server is not None else ""
    options = SglangOptions(url=url, python=python, args=tuple(args), weights=weights)
    wire = Wire(server.url if server is not None else url)
    return OneServer(config, folder, Sglang(config, options, wire, folder), server=server, **more)


def read_reply(
    reply: Mapping[str, Any],
    *,
    prompt: int = 2,
    start: int = 0,
    config: PolicyConfig,
    stops: Sequence[int] = (),
    left: int = 1 << 20,
) -> Attempt:
    """The attempt in a reply to `prompt` context tokens."""
    return read(reply, ask((0,) * prompt, start=start, stops=tuple(stops), left=left), config)


def ask(ids: Sequence[int] = (1, 2), *, start: int = 0, stops: tuple[int, ...] = (), left: int = 2) -> Ask:
    """A request without anything special."""
    return Ask("r", ids, left, 1.0, stops, 0, start, "s", "train", followed=False)


def terms(info: Mapping[str, Any], openapi: Mapping[str, Any], config: PolicyConfig) -> Terms:
    """The client's decision about a server that describes itself so."""
    return backend(config)._terms(info, openapi)


def backend(config: PolicyConfig) -> Sglang:
    """The client of a server that is not there."""
    return Sglang(config, SglangOptions(), Wire("http://127.0.0.1:9"), Path("/tmp/none"))


async def generate(wire: Wire, body: Mapping[str, Any], heard: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The last event of /generate; each has all before it."""
    last: dict[str, Any] = {}
    async for event in wire.events("/generate", {**body, "stream": True}):
        last = event
        heard(event)
    return last


def opened(
    config: PolicyConfig, folder: Path, id: str = "r", *, max_batch: int = 64, exact: bool = False, **options: Any
) -> OneServer | Fleet:
    """The engine of an [engine] section with these options."""
    section = Section(kind="sglang", exact=exact, max_batch=max_batch, options=options)
    made = msgspec.convert(options, SglangOptions)

    async def tokenizer() -> Path | None:
        return None

    setup = EngineSetup(section, config, folder, folder, id, tokenizer)
    return server_open.opened(setup, made, lambda wire, stage, most: Sglang(config, made, wire, stage, most))
