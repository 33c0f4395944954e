"""The version that sampled each token, read from a Trajectory's spans alone.

Positions count within a segment, which is the concatenation of (prompt_ids, ids) of its turns. The token at position i
was sampled by the version that computed position i - 1 first in the same turn.
"""

from headrace.messages.rollout import Trajectory


def versions(trajectory: Trajectory) -> list[int]:
    """The version of every sampled token, in order; -1 if no span of its turn covers position i - 1."""
    sampled_by: list[int] = []
    lengths: dict[int, int] = {}
    for turn in trajectory.turns:
        start = lengths.get(turn.segment, 0) + len(turn.prompt_ids)
        lengths[turn.segment] = start + len(turn.ids)
        for position in range(start - 1, start + len(turn.ids) - 1):
            covering = [span.version for span in turn.spans if span.start <= position < span.end]
            sampled_by.append(covering[0] if covering else -1)
    return sampled_by
