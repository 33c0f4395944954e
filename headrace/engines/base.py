"""The engine protocol: token ids in, token ids out, with everything the trainer needs to score them again.

An engine keeps a weight set per policy in use. A new version is staged beside the served one and flipped between two
decode steps; requests in flight go on, and their spans say which version forwarded which position.
"""

from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from headrace.messages.base import Array
from headrace.messages.rollout import Lane, PolicyRef, Sampling, Span


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `ids` is the whole context so far, token for token; the engine finds the cached prefix itself.

    session: trajectory and segment, under which KV is kept between turns until `close`.
    sampled ids end at a stop id (included) or after `sampling.max_turn_tokens`.
    """

    session: str
    ids: tuple[int, ...]
    policy: PolicyRef
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int
    """With the position, decides every draw: a repeat under the same weights gives the same ids, whatever the batch."""
    lane: Lane = "train"
    """The lane of the request: where capacity is short, production goes first."""


def check_request(request: SampleRequest, vocab: int, longest: int) -> None:
    """Refuse a request that no engine can answer. longest: positions of a context with its turn. EngineError."""
    if not request.ids:
        raise EngineError("a context of no tokens cannot be continued")
    for what, ids in (("token", request.ids), ("stop", request.stop_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            bad = next(id for id in ids if not 0 <= id < vocab)
            raise EngineError(f"{what} id {bad} is outside the vocabulary of {vocab}")
    if request.sampling.max_turn_tokens < 1:
        raise EngineError(f"max_turn_tokens {request.sampling.max_turn_tokens} leaves nothing to draw")
    if not 0 <= request.sampling.temperature < float("inf"):
        raise EngineError(f"temperature {request.sampling.temperature} is not a number from 0 on")
    if len(request.ids) + request.sampling.max_turn_tokens > longest:
        raise EngineError(f"a context of {len(request.ids)} and its turn go beyond {longest} positions")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens of one turn, and how they were computed."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the sampling that was used, one per id, rounded to float32."""
    routed: Array | None
    """[positions forwarded in this call, layers, top_k]; None for a dense model."""
    spans: tuple[Span, ...]
    """Absolute positions forwarded in this call, contiguous, by version."""
    stop: Literal["stop", "length", "abort"]


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """A completed flip: pause is the time in which no decode step could run."""

    version: int
    state_hash: str
    pause_ms: float


class EngineError(Exception):
    """The engine could not sample: infrastructure, never the policy's failure."""


class UnusableEngine(Exception):
    """This machine cannot run the configured engine, or not with these settings: the actor gives up."""


class Engine(Protocol):
    """All methods may be called concurrently from one event loop."""

    @property
    def fingerprint(self) -> str:
        """Numerics fingerprint: equal fingerprints promise equal bits."""

    @property
    def version(self) -> int:
        """The version that `latest` means now; -1 before the first load."""

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """Stage a checkpoint file (safetensors), verify its state hash, and make it `latest` between two decode steps.
        EngineError when the hash differs: the old version goes on."""

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """Keep a version beside `latest` for requests that name it."""

    async def unpin(self, version: int) -> None:
        """Forget a pinned version once no request names it."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Draw one generation. EngineError when it cannot be done at all."""

    async def close(self, session: str) -> None:
        """Forget the session's KV."""

    async def stop(self) -> None:
        """End the engine; requests in flight get EngineError."""


class OutsideLoad(Protocol):
    """Requests of other clients: those that run, wait, and are done since the server's start."""

    running: int
    queued: int
    done: int


@runtime_checkable
class ServerEngine(Protocol):
    """An engine whose requests run in a server of its own, which other clients may use too."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the server, for reports."""

    async def outside(self) -> OutsideLoad | None:
        """The load that other clients put on the server. EngineError when it cannot be told."""
