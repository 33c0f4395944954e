"""The engine protocol: token ids in, token ids out, with everything the trainer needs to score them again.

An engine holds the weights of every policy in use. A new version is staged while the old one serves, and becomes
`latest` between two decode steps. Requests in flight continue; their spans name the version that forwarded each
position. A trainer that repeats a step may give its version other bits. A span names the version alone, so the calls
that the old bits sample begin again, and what they forwarded is forwarded again.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import UNSET, UnsetType

from headrace.errors import HeadraceError
from headrace.messages.base import Array
from headrace.messages.rollout import Lane, PolicyRef, Sampling, Span


class Progress:
    """The ids of a request that is being sampled. The engine writes it from any thread; one task of the loop that made
    it reads it. The Sample is the record: after an update of the weights an engine may sample a request again."""

    def __init__(self, *, followed: bool) -> None:
        """followed: somebody reads the ids before the Sample; otherwise the request may only be cut."""
        self.followed = followed
        self.ids: list[int] = []
        """All ids sampled so far."""
        self.is_cut = False
        self.on_cut: Callable[[], object] | None = None
        """Set by the engine: ends the request."""
        self._loop, self._news, self._told = asyncio.get_running_loop(), asyncio.Event(), False

    def add(self, ids: Sequence[int], at: int) -> None:
        """Called by the engine: these ids come behind the first `at`. The reader is woken once until it reads."""
        self.ids[at:] = ids
        if self.followed and not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._news.set)

    async def news(self) -> list[int]:
        """Wait for new ids; all ids sampled so far."""
        await self._news.wait()
        self._news.clear()
        self._told = False
        return list(self.ids)

    def cut(self) -> None:
        """End the request with the ids so far: its sample then has the stop `abort`."""
        self.is_cut = True
        if self.on_cut is not None:
            with suppress(EngineError):  # the engine has stopped, and its requests with it
                self.on_cut()


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `ids` is the whole context so far, token for token; the engine looks up the cached prefix.

    session: trajectory and segment; the engine keeps its keys and values between turns until `close`.
    Sampled ids end with a stop id, which is included, or after `sampling.max_turn_tokens`.
    """

    session: str
    ids: tuple[int, ...]
    policy: PolicyRef
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    """Seed and position determine every draw: a repetition with the same weights gives the same ids in any batch."""
    lane: Lane = "train"
    """The lane of the request: when capacity is short, production goes first."""
    routed: int = 0
    """Number of leading positions whose routes the caller has from earlier turns, less than `ids`. A sample need not
    repeat them, also where it forwards these positions again."""
    answer: str = ""
    """A JSON Schema, as JSON, that the text of the sampled ids keeps; empty: any text."""
    free: bool = False
    """Sample without that grammar: a turn that may be a call. Its caller samples an answer again."""
    progress: Progress | None = None
    """Of a request whose tokens somebody follows, or that may be cut."""


def check_request(request: SampleRequest, vocab: int, longest: int, *, grammar: bool = False) -> None:
    """EngineError for a request that no engine can answer. longest: largest number of positions of a context and its
    turn. grammar: whether the engine keeps a schema."""
    if request.answer and not grammar:
        raise Unsupported("this policy's engine has no grammar, so no answer has a format: SGLang and vLLM have one")
    if not request.ids:
        raise EngineError("the context has no tokens; expected at least one")
    for what, ids in (("token", request.ids), ("stop", request.stop_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            bad = next(id for id in ids if not 0 <= id < vocab)
            raise EngineError(f"{what} id {bad} is outside the vocabulary of {vocab}; expected 0 to {vocab - 1}")
    if not 0 <= request.routed < len(request.ids):
        raise EngineError(f"expected routes of 0 to {len(request.ids) - 1} leading positions, got {request.routed}")
    if request.sampling.max_turn_tokens < 1:
        raise EngineError(f"expected max_turn_tokens >= 1, got {request.sampling.max_turn_tokens}")
    if not 0 <= request.sampling.temperature < float("inf"):
        raise EngineError(f"expected a finite temperature >= 0, got {request.sampling.temperature}")
    if len(request.ids) + request.sampling.max_turn_tokens > longest:
        raise EngineError(
            f"a context of {len(request.ids)} tokens and a turn of {request.sampling.max_turn_tokens} "
            f"exceed {longest} positions"
        )


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens of one turn, and how they were computed."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each id under the sampling that was used, rounded to float32."""
    routed: Array | None
    """Routed experts [positions from `routed_start` on, sparse layers, top_k]; None for a dense model."""
    spans: tuple[Span, ...]
    """The positions that this call forwarded, counted from the start of the context, by version. Contiguous, unless the
    call forwarded its context again with other weights."""
    stop: Literal["stop", "length", "abort"]
    routed_start: int | UnsetType = UNSET
    """As in a `Turn`."""


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """A completed switch to a version. pause_ms: milliseconds in which no decode step could run."""

    version: int
    state_hash: str
    pause_ms: float


class EngineError(HeadraceError):
    """The engine could not sample. This is an infrastructure failure and says nothing about the policy."""


class Unsupported(EngineError):
    """A request that asks for what this kind of engine does not have; the text is for the client."""


class RefusedVersion(EngineError):
    """A file that this engine will never serve: its bits have another hash than announced, or its tensors are of
    another model. A repetition gives the same error; a caller tries again when the file was written again."""


class UnusableEngine(HeadraceError):
    """This machine cannot run the configured engine with these settings; the actor ends with this text."""


class Sampler(Protocol):
    """The part of an engine that an episode uses."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one generation. EngineError when the engine cannot answer the request."""

    async def close(self, session: str) -> None:
        """Free the session's keys and values."""


class Engine(Sampler, Protocol):
    """All methods may be called concurrently from one event loop."""

    @property
    def fingerprint(self) -> str:
        """Numerics fingerprint: engines with equal fingerprints compute equal bits."""

    @property
    def version(self) -> int:
        """The version that `latest` means now; -1 before the first load."""

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """Stage a safetensors file, verify its state hash, and make it `latest` between two decode steps. The same
        version with another hash replaces the one that is served: calls in flight begin again, and sessions forward
        their positions again. EngineError when that fails, RefusedVersion when the hash differs or the tensors are not
        this model's; the old version then stays `latest`."""

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """Hold a version besides `latest` for requests that name it; with another hash it replaces the held one, as in
        `load`. EngineError as there."""

    async def unpin(self, version: int) -> None:
        """Release a pinned version; requests that run with it end with it."""

    async def stop(self) -> None:
        """End the engine; requests in flight get EngineError."""


class OutsideLoad(Protocol):
    """Requests of other clients: running, waiting, and finished since the server's start."""

    running: int
    queued: int
    done: int


@runtime_checkable
class ServerEngine(Protocol):
    """An engine whose requests run in a separate server, which other clients may use too."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the server, for reports."""

    async def outside(self) -> OutsideLoad | None:
        """The load of other clients on the server; None when it cannot be told apart. EngineError when there is no
        answer."""
