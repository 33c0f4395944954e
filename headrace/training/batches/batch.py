"""Builds a batch from the trajectories and scores of its groups.

Only sampled tokens have a loss, summaries included: the final reward of a trajectory reaches every token that it
sampled, in all its segments (self-summarisation as in Composer 2). The reward of a turn reaches the tokens of that turn
and of the turns before it (`advantages.to_go`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from headrace.algorithms.advantages import class_advantages, group_advantages, to_go
from headrace.algorithms.registry import Advantage
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import BatchGroup
from headrace.training.batches.segment import BatchError, Segment, tensors_of, weighted


@dataclass(frozen=True)
class Batch:
    """The records of one step, in the order of its manifest."""

    segments: tuple[Segment, ...]
    trajectories: int
    rewards: tuple[float, ...]
    passed: int
    groups: tuple[str, ...]
    fingerprints: frozenset[str]
    turn_rewards: tuple[float, ...] = ()
    """The rewards of turns, of the attempts that have such rewards."""

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(segment.targets) for segment in self.segments)

    @property
    def reward(self) -> float:
        """Mean reward of the trajectories."""
        return sum(self.rewards) / self.trajectories

    def versions(self) -> dict[int, int]:
        """Number of sampled tokens by version."""
        if not self.segments:
            return {}
        counts = torch.cat([segment.versions for segment in self.segments]).bincount()
        return {version: int(counts[version]) for version in counts.nonzero().view(-1).tolist()}


def build(
    groups: Sequence[BatchGroup],
    trajectories: Mapping[int, Trajectory],
    scores: Mapping[int, Score],
    advantage: Advantage = group_advantages,
    *,
    by_class: bool = False,
    built: Mapping[int, Sequence[Segment]] | None = None,
) -> Batch:
    """The batch of a manifest. `trajectories` and `scores` are keyed by stream sequence.

    advantage: the function from a group's rewards to its slots' advantages, as in `algorithms.registry`. by_class: it
    gets the rewards of all rollouts of a task class in the batch instead (`class_advantages`). An attempt whose Score
    has a baseline of its own is compared with that alone. built: `tensors_of` some of the trajectories, by sequence.
    BatchError when a record is missing, belongs to another slot, or contradicts itself.
    """
    segments: list[Segment] = []
    rewards: list[float] = []
    fingerprints: set[str] = set()
    passed = 0
    built = built or {}
    grouped: list[list[tuple[Trajectory, Score]]] = []
    for group in groups:
        members: list[tuple[Trajectory, Score]] = []
        for trajectory_seq, score_seq in group.slots:
            if trajectory_seq not in trajectories or score_seq not in scores:
                raise BatchError(f"group {group.group}: record {trajectory_seq} or {score_seq} is missing")
            trajectory, score = trajectories[trajectory_seq], scores[score_seq]
            slot = (trajectory.group, trajectory.slot, trajectory.attempt)
            if slot != (score.group, score.slot, score.attempt) or trajectory.group != group.group:
                raise BatchError(f"trajectory {trajectory.id}: its score belongs to another slot")
            members.append((trajectory, score))
        grouped.append(members)

    def relative(rewards: Callable[[Score], Sequence[float]]) -> Iterator[float]:
        """The advantages of some rewards of all slots, in order."""
        pools = [[(made.family, reward) for made, score in members for reward in rewards(score)] for members in grouped]
        if by_class:
            return iter(class_advantages([pair for pool in pools for pair in pool], advantage))
        return (value for pool in pools if pool for value in advantage([reward for _, reward in pool]))

    finals = relative(lambda score: (score.final_reward,) if score.baseline is None else ())
    of_turns = relative(lambda score: score.turn_rewards)
    for group, members in zip(groups, grouped, strict=True):
        for (seq, _), (trajectory, score) in zip(group.slots, members, strict=True):
            if score.by_turn is not None and len(score.by_turn.turns) != len(trajectory.turns):
                raise BatchError(f"trajectory {trajectory.id}: its score has rewards for another number of turns")
            value = next(finals) if score.baseline is None else score.final_reward - score.baseline
            turns = to_go([next(of_turns) for _ in score.turn_rewards])
            tensors = built[seq] if seq in built else tensors_of(trajectory)
            segments.extend(weighted(tensors, trajectory, value, len(segments), turns))
            fingerprints.add(trajectory.fingerprint)
            rewards.append(score.reward)
            passed += score.passed
    return Batch(
        tuple(segments),
        len(rewards),
        tuple(rewards),
        passed,
        tuple(g.group for g in groups),
        frozenset(fingerprints),
        tuple(reward for members in grouped for _, score in members for reward in score.turn_rewards),
    )
