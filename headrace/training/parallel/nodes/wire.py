"""The lines that node 0 and another node of a trainer exchange, and the check that they may train together.

One TCP connection per node, a JSON object per line: Coming, then Welcome, Later or Refused; then a Beat from both sides
every `BEAT_S` seconds, and once Ended or Stop. A node that has nothing to say for `LOST_S` seconds is gone: a machine
without power closes no connection.
"""

import hashlib
import socket
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import headrace
from headrace.config import Config
from headrace.messages.plugins import Plugin
from headrace.registry import differing
from headrace.training.parallel.nodes.local import Hello
from headrace.training.trainer import plugins_of

BEAT_S = 2.0
LOST_S = 30.0
_LONGEST = 1 << 20
"""Bytes of a line."""
COMPARED = ("policy", "algorithm", "numerics", "trainer", "curriculum")
"""Sections of the configuration that all nodes must have alike."""


class Coming(msgspec.Struct, frozen=True, tag=True):
    """From another node: it would start its ranks."""

    node: int
    version: str
    """As `version()`."""
    plugins: tuple[Plugin, ...]
    settings: dict[str, Any]
    """As `settings()`."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The node is to start its ranks."""

    hello: Hello
    port: int
    """Of the group's store, at the address of node 0."""


class Later(msgspec.Struct, frozen=True, tag=True):
    """The node is to ask again."""

    why: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The node may not train along; asking again does not help."""

    why: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The sender is alive."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From another node: one of its ranks has ended."""

    why: str
    alike: str = ""
    raised: str = ""
    """As in `interface.Loss`."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """From node 0: the trainer stops, and the ranks end by themselves."""


Line = Coming | Welcome | Later | Refused | Beat | Ended | Stop


@cache
def version() -> str:
    """The version of headrace and torch here, with a hash of headrace's source."""
    from torch import __version__ as torch_version

    digest, root = hashlib.sha256(), Path(headrace.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return f"headrace {headrace.__version__} ({digest.hexdigest()[:12]}) with torch {torch_version}"


def settings(config: Config) -> dict[str, Any]:
    """The settings that all nodes must have alike, by section."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))  # as they arrive
    return {name: values[name] for name in COMPARED}


def coming(config: Config, node: int) -> Coming:
    """The first line of a node. TrainerError for a plugin that it does not have."""
    return Coming(node, version(), plugins_of(config.algorithm), settings(config))


def difference(here: Coming, other: Coming, nodes: int) -> str:
    """The reason for which another node may not train along with node 0; empty when it may."""
    if not 0 < other.node < nodes:
        return f"expected --node 1 to {nodes - 1}, because [trainer] nodes = {nodes}; got {other.node}"
    if other.version != here.version:
        return f"node 0 has {here.version}, node {other.node} has {other.version}; install the same on both"
    for section, values in here.settings.items():
        for key, value in values.items():
            if (there := other.settings.get(section, {}).get(key)) != value:
                return (
                    f"[{section}] {key}: node 0 has {value!r}, node {other.node} has {there!r}; give both the same "
                    "configuration"
                )
    why = differing(here.plugins, other.plugins)
    return f"node {other.node}: {why}" if why else ""


class Talk:
    """One end of a connection. `say` may be called by several threads, `hear` by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()

    def say(self, line: Line) -> None:
        """Send a line. OSError when the other end has gone."""
        with self._lock:
            self._socket.sendall(msgspec.json.encode(line) + b"\n")

    def hear(self, seconds: float | None = None) -> Line:
        """The next line. OSError when none comes in time (default: `LOST_S`) or the other end has gone, ValueError for
        another one."""
        self._socket.settimeout(seconds or LOST_S)
        raw = self._file.readline(_LONGEST)
        if not raw.endswith(b"\n"):
            raise OSError("it closed the connection")
        try:
            return msgspec.json.decode(raw, type=Line)  # type: ignore[no-any-return]
        except msgspec.DecodeError as error:
            raise ValueError(f"expected a line of a trainer, got {raw[:40]!r}: {error}") from None

    def close(self) -> None:
        """End both directions, also of a `hear` that waits."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()  # waits for a `hear`, which the line above has ended
        self._socket.close()
