"""A turn that is being generated: joins its attempts into one sample.

Idea: a turn may need several requests, because one was aborted for a swap or by the server, or lost with the server.
Tokens of earlier attempts are kept: the next attempt's context is the turn's context and those tokens, and it reports
routes from the position where the last attempt ended. Spans count forwarded positions: the token at position i was
sampled by the version that forwarded position i - 1.

Between turns a session records the positions that were reported, and their weights. While these weights serve, the next
turn requests only new routes, and its prefix is cached. After a swap the prefix belongs to other weights: the whole
context is forwarded again under the new salt, and reported again.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.engines.base import Sample, SampleRequest
from headrace.engines.sglang.reply import Attempt
from headrace.engines.sglang.weights.lock import VersionFile
from headrace.messages.base import Array
from headrace.messages.rollout import Span
from headrace.policy.config import PolicyConfig


class Session(NamedTuple):
    """The positions of a session whose routes were reported."""

    ids: tuple[int, ...]
    """Context and sampled tokens of its last turn; all positions but the last one have routes."""
    label: str
    """The label of the weights that forwarded all positions; empty when several versions did."""


class Turn:
    """One request of the harness, from its first attempt to its sample."""

    def __init__(self, request: SampleRequest, session: Session | None, config: PolicyConfig) -> None:
        self.request, self._session, self._config = request, session, config
        self.ids = list(request.ids)
        self.logprobs: list[float] = []
        self._rows: list[NDArray[np.unsignedinteger]] = []
        self._spans: list[Span] = []
        self._labels: set[str] = set()
        self._reported: int | None = None

    @property
    def left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.request.sampling.max_turn_tokens - len(self.logprobs)

    def start(self, label: str) -> int:
        """First position whose routes the next attempt must report, when the weights with this label serve."""
        if self._reported is not None:
            return self._reported
        session = self._session
        if session is not None and session.label == label and session.ids == self.request.ids[: len(session.ids)]:
            return len(session.ids) - 1
        return 0

    def add(self, attempt: Attempt, start: int, weights: VersionFile, version_of: dict[str, int]) -> None:
        """Append an attempt that reports routes from position `start` on and whose first token was sampled by
        `weights`."""
        if not attempt.ids:
            return
        prompt = len(self.ids)
        self._span(start, prompt - 1, weights.version)
        for stretch in attempt.stretches:
            self._span(prompt - 1 + stretch.start, prompt - 1 + stretch.end, version_of[stretch.label])
            self._labels.add(stretch.label)
        if attempt.rows is not None:
            self._rows.append(attempt.rows)
        self.ids += attempt.ids
        self.logprobs += attempt.logprobs
        self._reported = len(self.ids) - 1

    def _span(self, start: int, end: int, version: int) -> None:
        if end <= start:
            return
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = Span(self._spans[-1].start, end, version)
        else:
            self._spans.append(Span(start, end, version))

    def sample(self, finish: str) -> Sample:
        """All attempts as one sample. finish: the reason for which the last one ended."""
        routed = None
        if self._config.experts and self._rows:
            rows = np.concatenate(self._rows)
            routed = Array(self._config.routed_dtype, rows.shape, rows.tobytes())
        return Sample(
            ids=tuple(self.ids[len(self.request.ids) :]),
            logprobs=tuple(self.logprobs),
            routed=routed,
            spans=tuple(self._spans),
            stop="stop" if finish == "stop" else "length" if finish == "length" else "abort",
        )

    def session(self) -> Session | None:
        """The session for the next turn; unchanged when no token was sampled."""
        if not self.logprobs:
            return self._session
        only = next(iter(self._labels)) if len(self._labels) == 1 else ""
        return Session(tuple(self.ids), only)
