"""The protocol that one kind of server implements, and what passes between it and `engine.ServerEngine`.

Idea: the engine keeps the guarantees of `engines.base.Engine` (admission, swaps, spans, sessions, lost servers), and a
backend translates: it writes a request, reads a reply and calls the server's own endpoints. A second kind of server is
one class with the methods of `Backend` and the options of its `[engine.options]` (docs/extending.md).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engines.base import UnusableEngine
from headrace.engines.server.http import Wire
from headrace.engines.server.weights.checksums import Digest
from headrace.engines.server.weights.lock import VersionFile
from headrace.messages.rollout import Lane

UPDATE_S = 600.0
"""Seconds after which an update of the weights has failed."""


class IncompatibleServer(UnusableEngine):
    """A server that this client cannot use; the text says what to change."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a server reports."""

    version: str
    device: str
    dtype: str
    tp_size: int = 1
    ep_size: int = 1
    context: int = 0
    """Largest number of positions of prompt and reply together; 0 when the server does not report it."""
    fingerprint: str
    """Never equal to the trainer's, because another program computes the model."""


class Ask(NamedTuple):
    """One request to a server. Every value that changes the distribution is here or fixed by the backend, so that no
    default of a server or a model applies."""

    rid: str
    """32 characters: a server may abort every request whose id begins with the given one."""
    ids: Sequence[int]
    """The whole context."""
    left: int
    """Largest number of tokens to sample."""
    temperature: float
    stops: tuple[int, ...]
    seed: int
    start: int
    """First position whose routes are wanted."""
    salt: str
    """Of the prefix-cache keys."""
    lane: Lane
    followed: bool
    """Somebody reads the tokens before the reply."""
    answer: str = ""
    """A JSON Schema that the text keeps; empty: any text."""


class Stretch(NamedTuple):
    """The weights with this label sampled the tokens start..end-1 of an attempt."""

    label: str
    start: int
    end: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to one request of a turn."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rows: NDArray[np.unsignedinteger] | None
    """Routed experts [positions forwarded from `Ask.start` on, sparse layers, top_k]; None for a dense model or without
    tokens. The dtype's largest value means not recorded."""
    stretches: tuple[Stretch, ...]
    finish: Literal["stop", "length", "abort"]
    cached: int = 0
    retractions: int = 0


class Load(NamedTuple):
    """A server's figures, summed over its ranks."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    """Largest share of KV memory in use on any rank."""
    tokens_per_s: float = 0.0
    hit_rate: float = 0.0


class Requests(NamedTuple):
    """Numbers of requests in a server, or of some of its clients."""

    running: int = 0
    queued: int = 0
    done: int = 0
    """Finished since the server's start."""


class Command(NamedTuple):
    """How a server is started."""

    arguments: Sequence[str]
    """The words behind the interpreter."""
    environment: Mapping[str, str]
    """Variables where this process has no value."""
    forced: Mapping[str, str]
    """Variables whatever this process has."""


class Way(Protocol):
    """A faster way than a load from the folder. The swapper tries ways in their order, and compares checksums."""

    async def prepare(self, before: VersionFile | None, model: Path, terms: Terms, *, compared: bool) -> bool:
        """Prepare a staged version while the server serves `before`. True when `send` may be tried. compared: the
        server's checksums will be compared."""

    async def send(self, label: str, terms: Terms) -> bool:
        """Give the prepared version to a paused server. False when that failed: the server's weights are then unknown.
        ServerError when the server is gone."""

    def failed(self, reason: str) -> None:
        """The server did not hold the version that was sent."""

    def discard(self) -> None:
        """Free what is prepared. Called after every change."""

    def stats(self) -> dict[str, float]:
        """Figures of the last change, for reports."""


class Backend(Protocol):
    """One kind of server, over the connection `wire`. Every method raises ServerError when the server does not answer
    as expected."""

    name: str
    """As users write it: SGLang, vLLM."""
    wire: Wire
    ways: Sequence[Way]

    def command(self, folder: Path, label: str, port: int) -> Command:
        """The start of a server that loads a checkpoint folder, reports `label` as its version if it can, and listens
        on a port of loopback."""

    async def describe(self) -> Terms:
        """The server's description of itself; asked until it answers. IncompatibleServer when it cannot be used."""

    async def ping(self, timeout_s: float) -> None:
        """An answer of the HTTP process alone."""

    async def load(self, timeout_s: float) -> Load:
        """The figures of the scheduler."""

    async def outside(self) -> Requests | None:
        """Requests of other clients; None when they cannot be told apart."""

    async def generate(self, ask: Ask, heard: Callable[[Sequence[int]], None]) -> Attempt:
        """Sample one turn. heard: called with all ids so far. The attempt passes `reply.checked`. No time limit: a
        paused server may hold a request for any time."""

    async def abort(self, rid: str, timeout_s: float) -> Any:
        """End a request, which then returns its tokens so far."""

    async def pause(self) -> None:
        """Freeze requests with their keys and values; new ones wait."""

    async def resume(self) -> None:
        """Continue."""

    async def served(self) -> str:
        """The label of the served version."""

    async def load_folder(self, folder: Path, label: str) -> None:
        """Load a checkpoint folder in place under a new label. EngineError when it was refused."""

    def digest(self, device: str, largest: int) -> Digest | None:
        """The server's checksum of a tensor on this device, of up to `largest` bytes; None when it is not known."""

    async def checksums(self, ranks: int) -> dict[str, str]:
        """The checksums of all tensors by `checksums.label`; empty text for a tensor that cannot be compared."""
