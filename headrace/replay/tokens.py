"""Which version wrote each sampled token: read from a Trajectory's spans alone, as an outsider would.

Positions count within a segment: the concatenation of (prompt_ids, ids) of its turns. The token at position i was
written by the version that forwarded position i - 1, and that forward happened in the turn that sampled it.
"""

from headrace.messages.rollout import Trajectory


def versions(trajectory: Trajectory) -> list[int]:
    """The version behind every sampled token, in order; -1 where no span of the turn covers its forward."""
    found: list[int] = []
    lengths: dict[int, int] = {}
    for turn in trajectory.turns:
        start = lengths.get(turn.segment, 0) + len(turn.prompt_ids)
        lengths[turn.segment] = start + len(turn.ids)
        for position in range(start - 1, start + len(turn.ids) - 1):
            covering = [span.version for span in turn.spans if span.start <= position < span.end]
            found.append(covering[-1] if covering else -1)
    return found
