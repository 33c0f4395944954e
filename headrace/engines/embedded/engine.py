"""The embedded engine: the trainer's model, sampled in a worker thread of this process.

Idea: exact mode is possible because sampler and trainer run the same functions. So the default engine is the trainer's
model with a paged cache and continuous batching. `worker` does all computation; this class turns awaited calls into
commands for it. A version is staged (copied and hashed) in slices between the worker's steps (`staging`), so decoding
continues, and the switch to it is one assignment between two steps.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap, check_request
from headrace.engines.embedded.jobs import EngineJob
from headrace.engines.embedded.staging import LoadedWeights, Shell, Staging, read_ahead
from headrace.engines.embedded.worker import Worker
from headrace.policy.config import PolicyConfig
from headrace.policy.numerics import Numerics
from headrace.policy.seam import PolicyModel

T = TypeVar("T")
CACHE_BLOCKS = 4096
"""KV blocks of 64 positions, unless the caller says how many."""


class EmbeddedEngine:
    """`engines.base.Engine` over the embedded model."""

    def __init__(
        self,
        config: PolicyConfig,
        numerics: Numerics,
        max_batch: int = 64,
        threads: int = 1,
        *,
        prefill_tokens: int = 2048,
        cache_blocks: int = CACHE_BLOCKS,
        device: torch.device | str = "cpu",
    ) -> None:
        """max_batch: largest number of requests that are decoded together. threads: torch threads of the worker.
        prefill_tokens: largest number of context tokens that a step forwards. cache_blocks: number of KV blocks of 64
        positions; on a CPU one uses memory when it is first written, elsewhere all do from the start. device: where the
        model computes; `numerics` are those of this device. OSError: the system refuses their address space."""
        self._config, self._numerics, self._device = config, numerics, torch.device(device)
        self._host: PolicyModel | None = None
        """The buffer in host memory through which versions reach another device."""
        self._worker = Worker(config, max_batch, threads, prefill_tokens, cache_blocks, self._device)
        self._worker.start()
        self._loading = asyncio.Lock()

    @property
    def fingerprint(self) -> str:
        """Numerics fingerprint: equal fingerprints promise equal bits."""
        return self._numerics.fingerprint

    @property
    def exact(self) -> bool:
        """Whether log-probabilities have the bits that the trainer computes."""
        return self._numerics.exact

    @property
    def version(self) -> int:
        """The version that `latest` means now; -1 before the first load."""
        latest = self._worker.latest
        return -1 if latest is None else latest.version

    def stats(self) -> dict[str, int]:
        """Counters since the start (tokens sampled, forwarded, reused; steps; evicted sessions) and present gauges."""
        worker = self._worker
        now = {
            "running": len(worker.running),
            "waiting": len(worker.waiting),
            "sessions": len(worker.sessions),
            "cache_bytes": worker.store.used_bytes,
        }
        return worker.counts | now

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """Stage a file, verify its state hash, and serve it as `latest` from the next step on.

        EngineError when it cannot be read, RefusedVersion when its hash differs or its tensors are not this model's;
        the old version then stays `latest`.
        """
        async with self._loading:
            weights = await self._stage(version, path, state_hash)
            return await self._ask(lambda: self._worker.flip(weights))

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """Hold a version besides `latest` for requests that name it. EngineError as in `load`."""
        async with self._loading:
            weights = await self._stage(version, path, state_hash)
            await self._ask(lambda: self._worker.pin(weights))

    async def unpin(self, version: int) -> None:
        """Release a pinned version; requests that run with it end with it."""
        await self._ask(lambda: self._worker.unpin(version))

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one generation. When the task is cancelled, the request ends and its session stays usable.

        EngineError for missing weights, an id outside the vocabulary, a context that does not fit, a busy session, or a
        stopped engine.
        """
        check_request(request, self._config.vocab, self._config.max_positions)
        future: Future[Sample] = Future()
        job = EngineJob(request, future)
        self._worker.post(lambda: self._worker.add(job))
        if request.progress is not None:
            request.progress.on_cut = lambda: self._worker.post(lambda: self._worker.cut(job))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # a stopped engine has no requests
                self._worker.post(lambda: self._worker.abort(job))
            raise

    async def close(self, session: str) -> None:
        """Free the session's keys and values; an unknown session is ignored."""
        await self._ask(lambda: self._worker.close(session))

    async def stop(self) -> None:
        """End the engine; requests in flight get EngineError. A second call does nothing."""
        with contextlib.suppress(EngineError):
            self._worker.post(self._worker.end)
        await asyncio.to_thread(self._worker.join)

    async def _ask(self, command: Callable[[], T]) -> T:
        """Run a command in the worker between two steps and return its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # cancelling the awaiting task does not cancel the command

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._worker.post(run)
        return await asyncio.wrap_future(future)

    async def _stage(self, version: int, path: str, state_hash: str) -> LoadedWeights:
        loaded = [weights for weights in (self._worker.latest, *self._worker.pinned.values()) if weights is not None]
        for weights in loaded:
            if (weights.version, weights.state_hash) == (version, state_hash):
                return weights
        await asyncio.to_thread(read_ahead, path)
        try:
            shell = self._worker.spare.pop()
        except IndexError:
            try:
                shell = await asyncio.to_thread(Shell, self._config, self._numerics, self._device, self._host)
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"{self._device} has no memory for version {version} beside others: {error}"
                ) from None
            if self._device.type != "cpu":
                self._host = shell.host
        staging = Staging(shell, version, path, state_hash)
        self._worker.post(lambda: self._worker.stage(staging))
        try:
            return await asyncio.wrap_future(staging.future)
        except EngineError:
            self._worker.spare.append(shell)
            raise
