"""The segments of a trajectory with their advantage, as the trainer makes them in two calls."""

from headrace.messages.rollout import Trajectory
from headrace.training.batches.segment import Segment, tensors_of, weighted


def segments_of(trajectory: Trajectory, advantage: float = 0.0) -> list[Segment]:
    """The segments of one trajectory that hold sampled tokens, in order. BatchError."""
    return weighted(tensors_of(trajectory), trajectory, advantage)
