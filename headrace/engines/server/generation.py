"""A turn that is being generated: joins its attempts into one sample.

Idea: a turn may need several requests, because one was aborted for a swap or by the server, or lost with the server.
Tokens of earlier attempts are kept: the next attempt's context is the turn's context and those tokens. Spans count
forwarded positions: the token at position i was sampled by the version that forwarded position i - 1 first.

A session records the positions that were forwarded, and their weights. While these weights serve, the prefix is cached.
After a swap it belongs to other weights: the whole context is forwarded again under the new salt, and spans say so.
Routes are requested only of positions that have none yet, because a trainer replays those of the first forward.

Spans name versions alone: when a version gets other bits, a turn with tokens of the old ones is sampled again.
"""

import asyncio
import uuid
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from headrace.engines.base import Progress, Sample, SampleRequest
from headrace.engines.server.backend import Attempt
from headrace.engines.server.http import ServerError
from headrace.engines.server.weights.lock import VersionFile
from headrace.messages.base import Array
from headrace.messages.rollout import Span
from headrace.policy.config import PolicyConfig


class Session(NamedTuple):
    """The positions of a session whose routes were reported."""

    ids: tuple[int, ...]
    """Context and sampled tokens of its last turn; all positions but the last one have routes."""
    label: str
    """The label of the weights of all positions' keys and values; empty when they are of several versions."""


class InFlight:
    """An attempt that was sent and has not ended."""

    def __init__(self, label: str, progress: Progress | None = None, before: int = 0) -> None:
        """label: of the weights that begin it. progress: of its turn, which has `before` sampled ids already."""
        self.label, self._progress, self._before = label, progress, before
        self.rid = uuid.uuid4().hex
        """Of fixed length, because a server may abort every request whose id begins with the given one."""
        self.started = False
        """Whether a token has arrived: then the server has forwarded the prompt."""
        self.work: asyncio.Task[Attempt] | None = None
        """Waits for the reply. It is cancelled when the server hangs."""

    def heard(self, ids: Sequence[int]) -> None:
        """Called with all ids of the attempt so far."""
        self.started = self.started or bool(ids)
        if ids and self._progress is not None:
            self._progress.add(ids, self._before)

    def attempt(self) -> Attempt:
        """The result of ended work. ServerError."""
        assert self.work is not None
        if self.work.cancelled():
            raise ServerError("gone", "the server hangs: it did not answer, and the request was given up")
        return self.work.result()


class Turn:
    """One request of the harness, from its first attempt to its sample."""

    def __init__(self, request: SampleRequest, session: Session | None, config: PolicyConfig) -> None:
        self.request, self._session, self._config = request, session, config
        self.begin()

    def begin(self) -> None:
        """Discard what was sampled."""
        self.ids = list(self.request.ids)
        self.logprobs: list[float] = []
        self._rows: list[NDArray[np.unsignedinteger]] = []
        self._spans: list[Span] = []
        self._labels: set[str] = set()
        """Of the weights of all positions' keys and values."""
        self._sampled: set[str] = set()
        """Labels of the weights that sampled tokens."""
        self._routed = self.request.routed
        """Number of leading positions with routes."""
        self._first: int | UnsetType = UNSET
        """First position of the routes of this turn."""
        self._sent = ""
        """The label of the weights that began the last attempt that counts."""

    @property
    def cut(self) -> bool:
        """Whether the caller wants no further token."""
        return self.request.progress is not None and self.request.progress.is_cut

    @property
    def left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.request.sampling.max_turn_tokens - len(self.logprobs)

    def start(self, label: str) -> int:
        """First position that the next attempt forwards, when the weights with this label serve."""
        if self._sent:
            return len(self.ids) - 1 if label == self._sent else 0
        session = self._session
        if session is not None and session.label == label and session.ids == self.request.ids[: len(session.ids)]:
            return len(session.ids) - 1
        return 0

    def routes(self, start: int) -> int:
        """First position whose routes an attempt must report that forwards the context from `start` on."""
        return max(start, self._routed)

    def accepts(self, attempt: Attempt, weights: VersionFile, replaced: Collection[str]) -> bool:
        """Whether an attempt counts that `weights` were to begin. replaced: labels of weights whose version has other
        bits now; a turn with tokens of them has no tokens afterwards."""
        labels = [stretch.label for stretch in attempt.stretches]
        if not self._sampled.union(labels).isdisjoint(replaced):
            self.begin()
            return False
        # An attempt that waited inside the server while weights changed may mix keys and values of both versions in
        # its prompt.
        return not labels or labels[0] == weights.label

    def add(self, attempt: Attempt, start: int, weights: VersionFile, version_of: dict[str, int]) -> None:
        """Append an attempt that forwarded the context from position `start` on, has the routes from `routes(start)`
        on, and whose first token was sampled by `weights`."""
        if not attempt.ids:
            return
        prompt, self._sent = len(self.ids), weights.label
        if self._first is UNSET:
            self._first = self.routes(start)
        if not start:
            self._labels.clear()  # all positions have keys and values of these weights now
        self._span(start, prompt - 1, weights.version)
        for stretch in attempt.stretches:
            self._span(prompt - 1 + stretch.start, prompt - 1 + stretch.end, version_of[stretch.label])
            self._labels.add(stretch.label)
            self._sampled.add(stretch.label)
        if attempt.rows is not None:
            self._rows.append(attempt.rows)
        self.ids += attempt.ids
        self.logprobs += attempt.logprobs
        self._routed = len(self.ids) - 1

    def _span(self, start: int, end: int, version: int) -> None:
        if end <= start:
            return
        if self._spans and self._spans[-1].version == version and self._spans[-1].end == start:
            self._spans[-1] = Span(self._spans[-1].start, end, version)
        else:
            self._spans.append(Span(start, end, version))

    def sample(self, finish: str) -> Sample:
        """All attempts as one sample. finish: the reason for which the last one ended."""
        routed: Array | None = None
        start: int | UnsetType = UNSET
        if self._config.experts and self._rows:
            rows = np.concatenate(self._rows)
            routed = Array(self._config.routed_dtype, rows.shape, rows.tobytes())
            start = self._first if self._first != self._spans[0].start else UNSET
        return Sample(
            ids=tuple(self.ids[len(self.request.ids) :]),
            logprobs=tuple(self.logprobs),
            routed=routed,
            spans=tuple(self._spans),
            stop="stop" if finish == "stop" else "length" if finish == "length" else "abort",
            routed_start=start,
        )

    def session(self) -> Session | None:
        """The session for the next turn; unchanged when no token was sampled."""
        if not self.logprobs:
            return self._session
        only = next(iter(self._labels)) if len(self._labels) == 1 else ""
        return Session(tuple(self.ids), only)
