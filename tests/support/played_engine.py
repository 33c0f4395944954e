"""An engine, by its name in [engine] kind, that samples the completions of tests/support/completions.py."""

import hashlib

from headrace.engines.base import Sample, SampleRequest
from tests.support.completions import completions
from tests.support.text_engine import TextEngine

PLAYED: dict[str, list[str]] = {}
"""Trajectory to the completions that were sampled for it."""
SYNTAX = "hermes"


class PlayedEngine(TextEngine):
    """The n-th turn of a trajectory is the n-th completion that its name seeds."""

    async def sample(self, request: SampleRequest) -> Sample:
        trajectory = request.session.rpartition("/")[0]
        played = PLAYED.setdefault(trajectory, [])
        seed = int.from_bytes(hashlib.sha256(trajectory.encode()).digest()[:6])
        text = list(completions(seed, len(played) + 1, only=SYNTAX))[-1][1]
        played.append(text)
        return self.sampled(request, text)


open_engine = PlayedEngine.open
