"""Requests of the embedded engine's worker."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Literal

from msgspec import UNSET

from headrace.engines.base import EngineError, Sample, SampleRequest
from headrace.engines.embedded.cache import Session
from headrace.engines.embedded.staging import LoadedWeights
from headrace.kernels.block_attention import BLOCK
from headrace.messages.base import Array
from headrace.messages.rollout import Span
from headrace.policy.config import PolicyConfig


class EngineJob:
    """One request, from its arrival to its sample."""

    def __init__(self, request: SampleRequest, future: "Future[Sample]") -> None:
        self.request, self.future = request, future
        future.set_running_or_notify_cancel()  # from now on only the worker sets the result
        self.context = list(request.ids)
        """The request's tokens, then the sampled ones."""
        self.given = len(self.context)
        self.logprobs: list[float] = []
        self.pinned: LoadedWeights | None = None
        """Set when the request arrives, so that the weights stay in memory after an unpin."""
        self.session = Session("")
        self.report = 0
        """First position that the sample has to report."""
        self.stops = frozenset(request.stop_ids)

    @property
    def urgent(self) -> bool:
        """Whether it is a request of the product."""
        return self.request.lane == "production"

    @property
    def left(self) -> int:
        """Number of tokens of the context that were not forwarded yet."""
        return len(self.context) - len(self.session.ids)

    @property
    def most_blocks(self) -> int:
        """Largest number of blocks that the request may need; its call never forwards its last sampled token."""
        return (self.given + self.request.sampling.max_turn_tokens - 1 + BLOCK - 1) // BLOCK

    @property
    def missing_blocks(self) -> int:
        """Number of these blocks that its session does not have yet."""
        return self.most_blocks - len(self.session.blocks)

    def begin_again(self) -> None:
        """Discard what was sampled. The caller drops the session's positions and queues the request."""
        del self.context[self.given :]
        self.logprobs.clear()

    def answer(self, stop: Literal["stop", "length", "abort"], config: PolicyConfig, row: int) -> None:
        """Set the sample as the result. row: bytes of routes per position."""
        session, start = self.session, self.report
        end = len(session.ids)
        routed, first = None, max(start, self.request.routed)
        if config.experts:
            shape = (end - first, config.sparse_layers, config.top_k)
            routed = Array(config.routed_dtype, shape, bytes(session.routed[first * row : end * row]))
        self.future.set_result(
            Sample(
                ids=tuple(self.context[self.given :]),
                logprobs=tuple(self.logprobs),
                routed=routed,
                spans=tuple(Span(max(s.start, start), s.end, s.version) for s in session.spans if s.end > start),
                stop=stop,
                routed_start=first if config.experts and first > start else UNSET,
            )
        )

    def fail(self, text: str, cause: BaseException | None = None) -> None:
        """Set an EngineError as the result, unless there is a result already."""
        error = EngineError(text)
        error.__cause__ = cause
        if not self.future.done():
            self.future.set_exception(error)


def begin_again(
    running: list[EngineJob],
    waiting: list[EngineJob],
    stale: Collection[Session],
    new: LoadedWeights,
    served: Collection[bytes],
) -> int:
    """Queue the running requests of stale sessions before those that wait, in order of lanes. Returns their number.

    Requests of weights with the number of `new` that are no longer served get `new`. served: keys of weights.
    """
    again = [job for job in running if job.session in stale]
    for job in again:
        running.remove(job)
        job.begin_again()
    waiting[:] = sorted((*again, *waiting), key=lambda job: not job.urgent)
    for job in (*running, *waiting):
        if job.pinned is not None and job.pinned.version == new.version and job.pinned.key not in served:
            job.pinned = new
    return len(again)


def chunks(jobs: Sequence[EngineJob], most: int) -> list[tuple[EngineJob, int]]:
    """The jobs that have more than one token to forward, in order, with their next numbers of tokens: together at most
    `most`."""
    out: list[tuple[EngineJob, int]] = []
    for job in jobs:
        if job.left > 1 and most:
            out.append((job, min(job.left, most)))
            most -= out[-1][1]
    return out


def evened(jobs: Sequence[tuple[EngineJob, int]]) -> list[list[tuple[EngineJob, int]]]:
    """Jobs with their numbers of tokens, in batches in which padding to the longest at most triples the work."""
    batches: list[list[tuple[EngineJob, int]]] = []
    tokens = longest = 0
    for job, count in sorted(jobs, key=lambda pair: -pair[1]):
        if not batches or longest * (len(batches[-1]) + 1) > 3 * (tokens + count):
            batches.append([])
            tokens, longest = 0, count
        batches[-1].append((job, count))
        tokens += count
    return batches
