"""The embedded engine's worker thread: admission, chunked prefill, decoding, and switches of weights between steps.

Idea: one thread owns model, cache and sessions, so none of them needs a lock. Other threads post commands; the worker
runs them between two steps, and weights change at no other time. Before each step the worker admits the requests that
fit. A step forwards, per set of weights, at most `prefill_tokens` of new context and one token of every request that is
decoding.

Admission reserves all blocks that a request may need, so a running request always gets its blocks.

Requests of the product go first. They do not wait for a place that training takes, and while any of them runs, the
steps are theirs alone, except every `SHARED`th, so that training never stands still. A request of the product therefore
waits for one step that is under way, and for blocks of the cache when training has reserved all of them.

While a version is being staged, each step is followed by a slice of staging (`staging`).

On a GPU the operands of a forward and of its draws are moved before it, and their results are read once after it. The
log-probabilities come from the operator of the trainer there, so that they have its bits.
"""

import itertools
import math
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from headrace.engines.base import EngineError, Swap
from headrace.engines.embedded.cache import BlockStore, Session, chain_key, route_bytes
from headrace.engines.embedded.jobs import EngineJob, begin_again, chunks, evened
from headrace.engines.embedded.sampling import draw, drawn, uniform
from headrace.engines.embedded.staging import SHARE, SLICE_S, LoadedWeights, Shell, Staging
from headrace.kernels.block_attention import BLOCK
from headrace.policy.config import PolicyConfig
from headrace.policy.device import select
from headrace.policy.provider import new_cache
from headrace.policy.seam import PolicyModel

_CPU = torch.device("cpu")
SHARED = 8
"""While requests of the product run, one step in this number serves training too."""


class Worker(threading.Thread):
    """Owns model, cache and sessions. Other threads may call `post` alone."""

    def __init__(
        self,
        config: PolicyConfig,
        max_batch: int,
        threads: int,
        prefill_tokens: int,
        limit: int,
        device: torch.device = _CPU,
    ) -> None:
        super().__init__(name="headrace-engine", daemon=True)
        self.device = device
        self.config, self.max_batch, self.threads, self.prefill_tokens = config, max_batch, threads, prefill_tokens
        self.row = config.sparse_layers * config.top_k * (1 if config.routed_dtype == "|u1" else 2)
        """Bytes of routes per position."""
        self.latest: LoadedWeights | None = None
        self.pinned: dict[int, LoadedWeights] = {}
        self.staging: deque[Staging] = deque()
        self.spare: deque[Shell] = deque(maxlen=1)
        """A model that is no longer served, for the next staging."""
        self.sessions: dict[str, Session] = {}
        self.recent: OrderedDict[str, Session] = OrderedDict()
        """The sessions that may have blocks, least recently used first: eviction looks at no others."""
        self.waiting: list[EngineJob] = []
        self.running: list[EngineJob] = []
        self.store = BlockStore(new_cache(config, limit, device))
        self.counts = {"sampled": 0, "forwarded": 0, "reused": 0, "steps": 0, "evicted": 0, "redrawn": 0}
        self._numbers: dict[int, bytes] = {}
        """The key of the weights that had each version number last."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopping = self._closed = False
        self._alone = 0

    def post(self, command: Callable[[], None]) -> None:
        """Run a command in the worker thread between two steps. EngineError when the thread has ended."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine was stopped")
            self._commands.put(command)

    # Commands: these run in the thread.

    def add(self, job: EngineJob) -> None:
        """Queue a request, or fail it at once."""
        request = job.request
        if request.policy.kind == "pinned":
            job.pinned = self.pinned.get(request.policy.version)
            if job.pinned is None:
                return job.fail(f"version {request.policy.version} is not pinned in this engine")
        elif request.policy.kind != "latest":
            return job.fail(f"an embedded engine has no {request.policy.kind} policy")
        elif self.latest is None:
            return job.fail("the engine has no weights yet; load a version first")
        blocks = self.store.cache.blocks
        if job.most_blocks > blocks:
            return job.fail(f"the request may need {job.most_blocks} KV blocks, the cache has {blocks}")
        session = self.sessions.setdefault(request.session, Session(request.session))
        if session.busy:
            return job.fail(f"session {request.session} is sampling already")
        session.busy = True
        job.session = session
        first = sum(other.urgent for other in self.waiting) if job.urgent else len(self.waiting)
        self.waiting.insert(first, job)

    def abort(self, job: EngineJob) -> None:
        """Remove a request; its session keeps the forwarded positions."""
        for jobs in (self.waiting, self.running):
            if job in jobs:
                jobs.remove(job)
                job.session.busy = False

    def cut(self, job: EngineJob) -> None:
        """End a request with the tokens that it has."""
        if job in self.running and job.logprobs:
            self._finish(job, "abort")
        elif not job.future.done():
            self.abort(job)
            job.fail("the request was cut before its first token")

    def close(self, name: str) -> None:
        """Forget a session."""
        session = self.sessions.get(name)
        if session is None:
            return
        for job in [job for job in (*self.waiting, *self.running) if job.session is session]:
            self.abort(job)
            job.fail(f"session {name} was closed")
        self._drop(self.sessions.pop(name))

    def flip(self, weights: LoadedWeights) -> Swap:
        """Make weights `latest` from the next step on."""
        began = time.perf_counter()
        before, self.latest = self.latest, weights
        self._keep_served(weights)
        # A model becomes spare only here; `EmbeddedEngine` holds its lock while it calls this or takes the spare model.
        if before is not None and not self._used(before):
            self.spare.append(before.shell)
        pause = (time.perf_counter() - began) * 1e3
        return Swap(version=weights.version, state_hash=weights.state_hash, pause_ms=pause)

    def pin(self, weights: LoadedWeights) -> None:
        """Hold weights for requests that name their version."""
        self.pinned[weights.version] = weights
        self._keep_served(weights)

    def unpin(self, version: int) -> None:
        """Release a pinned version; requests that run with it keep it until they end."""
        self.pinned.pop(version, None)
        self._keep_served()

    def stage(self, staging: Staging) -> None:
        """Queue a staging, which runs in slices between two steps."""
        self.staging.append(staging)

    def end(self) -> None:
        """Stop after this step."""
        self._stopping = True

    # The loop.

    def run(self) -> None:
        """Run commands, admit requests and forward, until `end` was called."""
        torch.set_num_threads(self.threads)
        select(self.device)
        cause: BaseException | None = None
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._run_commands()
                    self._admit()
                    began = time.perf_counter()
                    self._step()
                    if self.staging:
                        self._stage_on(time.perf_counter() - began)
        except BaseException as error:
            cause = error
            raise
        finally:
            self._shut(cause)

    def _shut(self, cause: BaseException | None) -> None:
        """Refuse new commands and answer every request that still waits."""
        with self._lock:
            self._closed = True
        text = "the engine was stopped" if cause is None else f"the engine failed: {cause!r}"
        while not self._commands.empty():
            self._commands.get()()
        for staging in self.staging:
            staging.fail(EngineError(text))
        self.staging.clear()
        for job in (*self.waiting, *self.running):
            job.fail(text, cause)
        self.waiting.clear()
        self.running.clear()

    def _run_commands(self) -> None:
        """Run the commands that wait; sleep for one when there is nothing to compute."""
        while True:
            try:
                idle = not self.running and not self.waiting and not self.staging
                command = self._commands.get() if idle and not self._stopping else self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _weights(self, job: EngineJob) -> LoadedWeights:
        weights = job.pinned or self.latest
        assert weights is not None
        return weights

    def _stage_on(self, step_s: float) -> None:
        """Run a slice of staging after a step that took `step_s` seconds. Without requests in flight the slice is
        longer, but short enough for commands."""
        slice_s = max(SLICE_S, SHARE * step_s) if self.running else 20 * SLICE_S
        if self.staging[0].advance(time.perf_counter() + slice_s):
            self.staging.popleft()

    def _used(self, weights: LoadedWeights) -> bool:
        served = (self.latest, *self.pinned.values(), *(job.pinned for job in (*self.waiting, *self.running)))
        return any(other is weights for other in served)

    def _keep_served(self, new: LoadedWeights | None = None) -> None:
        """Forget what weights wrote that are no longer served. new: weights that are served from now on."""
        served = {weights.key for weights in (self.latest, *self.pinned.values()) if weights is not None}
        if new is not None and self._numbers.setdefault(new.version, new.key) != new.key:
            self._numbers[new.version] = new.key
            self._begin_again(new, served)
        self.store.keep_only(served)

    def _begin_again(self, new: LoadedWeights, served: set[bytes]) -> None:
        """Other bits had the number of `new`, and a span names the number alone. So no session keeps positions of
        weights that are not served; which of the versions before `new` have other bits too is not known here."""
        stale = [session for session in self.recent.values() if session.ids and session.pure not in served]
        self.counts["redrawn"] += begin_again(self.running, self.waiting, stale, new, served)
        for session in stale:
            self._drop(session)

    def _admit(self) -> None:
        """Start waiting requests, in order, as far as batch and cache allow. The product and training have `max_batch`
        places each."""
        leading: set[bytes] = set()
        for job in self.running:
            if len(job.session.ids) < BLOCK < job.given:
                leading.add(chain_key(self._weights(job).key, b"", job.context[:BLOCK]))
        promised = sum(job.missing_blocks for job in self.running)
        places = Counter(job.urgent for job in self.running)
        for job in list(self.waiting):
            if places[job.urgent] == self.max_batch:
                continue
            session, weights = job.session, self._weights(job)
            if not session.ids and job.given > BLOCK:
                key = chain_key(weights.key, b"", job.context[:BLOCK])
                if key in leading and key not in self.store.index:
                    continue  # another request computes this prefix now: reuse it in a later step
                leading.add(key)
            if not self._reserve(job, promised):
                return
            promised += job.missing_blocks
            places[job.urgent] += 1
            self._begin(job, weights)

    def _begin(self, job: EngineJob, weights: LoadedWeights) -> None:
        """Reuse the cached start of the context and let the request run."""
        session = job.session
        self.recent[session.name] = session
        self.recent.move_to_end(session.name)
        shared = 0
        for have, want in zip(session.ids, job.context[:-1], strict=False):
            if have != want:
                break
            shared += 1
        self.store.trim(session, shared, self.row)
        job.report = session.report_from(job.context)
        if not session.ids:
            self.store.adopt(session, job.context, weights.key)
        self.counts["reused"] += len(session.ids)
        self.waiting.remove(job)
        self.running.append(job)

    def _reserve(self, job: EngineJob, promised: int) -> bool:
        """Whether all blocks that the request may need are available and not reserved for other requests; evicts idle
        sessions if necessary."""
        while self.store.available < promised + job.missing_blocks:
            oldest = next((session for session in self.recent.values() if not session.busy), None)
            if oldest is None and not self.running:  # waiting requests may hold KV of earlier turns
                oldest = next((session for session in self.recent.values() if session is not job.session), None)
            if oldest is None:
                return False
            self._drop(oldest)
            self.counts["evicted"] += 1
        return True

    def _drop(self, session: Session) -> None:
        """Release all blocks of a session."""
        self.recent.pop(session.name, None)
        self.store.drop(session)

    def _step(self) -> None:
        """One prefill call and one decode call per set of weights in use."""
        groups: dict[int, list[EngineJob]] = {}
        for job in self._due():
            groups.setdefault(id(self._weights(job)), []).append(job)
        for jobs in groups.values():
            try:
                self._serve(self._weights(jobs[0]), jobs)
            except Exception as error:  # every request gets an answer, with the cause
                for job in jobs:
                    if job in self.running:
                        self.running.remove(job)
                    job.session.busy = False
                    self._drop(job.session)
                    job.fail(f"the forward pass failed: {error!r}", error)

    def _due(self) -> list[EngineJob]:
        """The requests of the next step."""
        urgent = [job for job in self.running if job.urgent]
        self._alone = self._alone + 1 if 0 < len(urgent) < len(self.running) else 0
        return urgent if self._alone % SHARED else self.running

    def _serve(self, weights: LoadedWeights, jobs: list[EngineJob]) -> None:
        decoding = [job for job in jobs if job.left == 1]
        for batch in evened(chunks(jobs, self.prefill_tokens)):
            self._forward(weights, [job for job, _ in batch], [length for _, length in batch])
        if decoding:
            self._forward(weights, decoding, [1] * len(decoding))

    def _forward(self, weights: LoadedWeights, jobs: list[EngineJob], lengths: list[int]) -> None:
        """Forward the next lengths[i] tokens of each job's context; then draw a token for each job with none left."""
        starts = [len(job.session.ids) for job in jobs]
        parts = [job.context[at : at + n] for job, at, n in zip(jobs, starts, lengths, strict=True)]
        for job, at, n in zip(jobs, starts, lengths, strict=True):
            for _ in range((at + n + BLOCK - 1) // BLOCK - len(job.session.blocks)):
                job.session.blocks.append(self.store.take())
        ready = [job for job, n in zip(jobs, lengths, strict=True) if job.left == n]
        ends = list(itertools.accumulate(lengths))
        rows = [end - 1 for job, end, n in zip(jobs, ends, lengths, strict=True) if job.left == n]
        chances = self._chances(ready)
        recorder: list[Tensor] = []
        ids = self._here([token for part in parts for token in part], torch.int64)
        tables = [job.session.blocks for job in jobs]
        hidden = weights.model.forward_cached(ids, lengths, starts, tables, self.store.cache, None, recorder)
        results: tuple[list[int], list[float]] = ([], [])
        if ready:
            last = hidden if len(rows) == len(hidden) else hidden.index_select(0, self._here(rows, torch.int64))
            results = self._draw(weights.model, last, *chances)
        routes, row = route_bytes(recorder, self.config.routed_dtype), self.row
        for job, part, end, n in zip(jobs, parts, ends, lengths, strict=True):
            session = job.session
            session.note(part, weights.version, weights.key, routes[(end - n) * row : end * row])
            if len(session.ids) // BLOCK > len(session.chain):
                self.store.offer(session, weights.version, weights.key, row)
        self.counts["forwarded"] += len(ids)
        self.counts["steps"] += 1
        self._take(ready, *results)

    def _here(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Numbers of the host as a tensor on the device."""
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def _chances(self, jobs: list[EngineJob]) -> tuple[Tensor, Tensor]:
        """Temperatures float32 [M] and uniform numbers float64 [M] of the next draws. They go to the device before the
        forward, because a copy waits for the work that was launched before it."""
        heat = self._here([job.request.sampling.temperature for job in jobs], torch.float32)
        chance = self._here([uniform(job.request.seed, len(job.context)) for job in jobs], torch.float64)
        return heat, chance

    def _draw(self, model: PolicyModel, last: Tensor, heat: Tensor, chance: Tensor) -> tuple[list[int], list[float]]:
        """Ids and their log-probabilities, from hidden states [M, D]."""
        logits = model.logits(last)
        if self.device.type == "cpu":
            ids, logprobs = draw(logits, heat, chance)
            return ids.tolist(), logprobs.tolist()
        ids = drawn(logits, heat, chance)
        logprobs, _ = model.selected_logprobs(last, ids, heat)
        first, second = torch.stack((ids.double(), logprobs.double())).cpu().tolist()  # exact; one wait
        return [int(token) for token in first], second

    def _take(self, jobs: list[EngineJob], ids: list[int], logprobs: list[float]) -> None:
        """Add drawn tokens to their requests; those that end are answered."""
        for job, token, logprob in zip(jobs, ids, logprobs, strict=True):
            if not math.isfinite(logprob):
                self.abort(job)
                self.store.drop(job.session)
                job.fail(f"version {self._weights(job).version} gives logits that are not finite")
                continue
            job.context.append(token)
            job.logprobs.append(logprob)
            if job.request.progress is not None:
                job.request.progress.add((token,), len(job.logprobs) - 1)
            if token in job.stops:
                self._finish(job, "stop")
            elif len(job.logprobs) >= job.request.sampling.max_turn_tokens:
                self._finish(job, "length")
        self.counts["sampled"] += len(jobs)

    def _finish(self, job: EngineJob, stop: Literal["stop", "length", "abort"]) -> None:
        """Release the session and return the sample."""
        job.session.calls.append(len(job.context))
        self.abort(job)
        job.answer(stop, self.config, self.row)
