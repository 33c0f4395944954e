"""Builds a batch from the trajectories and scores of its groups.

Only sampled tokens have a loss, summaries included: the final reward of a trajectory reaches every token that it
sampled, in all its segments (self-summarisation as in Composer 2). The reward of a turn reaches the tokens of that turn
and of the turns before it (`advantages.to_go`).
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace.algorithms.advantages import Advantage, Attempt, class_advantages, mean, to_go
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.training import BatchGroup, LeftOut
from headrace.policy.config import PolicyConfig
from headrace.registry import PluginError
from headrace.training.batches.segment import BatchError, Segment, check, tensors_of, weighted


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
    left_out: tuple[LeftOut, ...] = ()
    """The slots of the manifest that are not among the trajectories."""

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


class _Slot(NamedTuple):
    """A slot that can be trained on."""

    made: Trajectory
    score: Score
    tensors: Sequence[Segment]
    seq: int
    """Of the Trajectory."""


def build(
    groups: Sequence[BatchGroup],
    trajectories: Mapping[int, Trajectory],
    scores: Mapping[int, Score],
    advantage: Advantage = mean,
    *,
    by_class: bool = False,
    built: Mapping[int, Sequence[Segment]] | None = None,
    policy: PolicyConfig | None = None,
) -> Batch:
    """The batch of a manifest. `trajectories` and `scores` are keyed by stream sequence.

    advantage: from the attempts of a group to one number each, as in `algorithms.registry`; the rewards of turns are
    compared in a call of their own. by_class: it gets all rollouts of a task class in the batch instead
    (`class_advantages`). An attempt whose Score has a baseline of its own is compared with that alone. built:
    `tensors_of` some of the trajectories, by sequence. policy: the one to train; None checks the records alone.

    An attempt is left out when a record is missing, belongs to another slot, contradicts itself or cannot be computed
    by the policy. So is the rest of its group when fewer than two remain. BatchError when no attempt remains.
    """
    segments: list[Segment] = []
    rewards: list[float] = []
    fingerprints: set[str] = set()
    passed = 0
    grouped: list[list[_Slot]] = []
    left_out: list[LeftOut] = []
    for group in groups:
        members: list[_Slot] = []
        lost: list[LeftOut] = []
        for slot in group.slots:
            try:
                members.append(_attempt(group.group, slot, trajectories, scores, built or {}, policy))
            except BatchError as error:
                lost.append(LeftOut(trajectory_seq=slot[0], reason=error.reason, detail=str(error)))
        if lost and len(members) < 2 and any(member.score.baseline is None for member in members):
            why = f"group {group.group}: {len(members)} of {len(group.slots)} attempts can be trained on"
            lost += [LeftOut(trajectory_seq=m.seq, reason="group_too_small", detail=why) for m in members]
            members = []
        grouped.append(members)
        left_out += lost
    if not any(grouped):
        raise BatchError(f"no attempt of the batch can be trained on: {left_out[0].detail}")

    compare = functools.partial(_compared, advantage)

    def relative(pools: Sequence[list[Attempt]]) -> Iterator[float]:
        """The advantages of all attempts, in order."""
        if by_class:
            return iter(class_advantages(list(itertools.chain.from_iterable(pools)), compare))
        return (value for pool in pools if pool for value in compare(pool))

    finals = relative(
        [[Attempt(m.score.final_reward, m.made, m.score) for m in ms if m.score.baseline is None] for ms in grouped]
    )
    of_turns = relative(
        [[Attempt(r, m.made, m.score, t) for m in ms for t, r in enumerate(m.score.turn_rewards)] for ms in grouped]
    )
    for made, score, tensors, _ in itertools.chain.from_iterable(grouped):
        value = next(finals) if score.baseline is None else score.final_reward - score.baseline
        turns = to_go([next(of_turns) for _ in score.turn_rewards])
        segments.extend(weighted(tensors, made, value, len(segments), turns))
        fingerprints.add(made.fingerprint)
        rewards.append(score.reward)
        passed += score.passed
    return Batch(
        tuple(segments),
        len(rewards),
        tuple(rewards),
        passed,
        tuple(g.group for g in groups),
        frozenset(fingerprints),
        tuple(reward for members in grouped for each in members for reward in each.score.turn_rewards),
        tuple(left_out),
    )


def _compared(advantage: Advantage, group: Sequence[Attempt]) -> list[float]:
    """The advantages of a group. PluginError unless they are one finite number for each attempt."""
    values = advantage(group)
    if len(values) != len(group) or not all(map(math.isfinite, values)):
        raise PluginError(
            f"an advantage gives one finite number for each of {len(group)} attempts, got {values!r:.200}"
        )
    return values


def _attempt(
    group: str,
    slot: tuple[int, int],
    trajectories: Mapping[int, Trajectory],
    scores: Mapping[int, Score],
    built: Mapping[int, Sequence[Segment]],
    policy: PolicyConfig | None,
) -> _Slot:
    """One slot of a group. BatchError when it cannot be trained on."""
    seq, score_seq = slot
    if seq not in trajectories or score_seq not in scores:
        raise BatchError(f"group {group}: record {seq} or {score_seq} is missing")
    made, score = trajectories[seq], scores[score_seq]
    if (made.group, made.slot, made.attempt) != (score.group, score.slot, score.attempt) or made.group != group:
        raise BatchError(f"trajectory {made.id}: its score belongs to another slot")
    if score.by_turn is not None and len(score.by_turn.turns) != len(made.turns):
        raise BatchError(f"trajectory {made.id}: its score has rewards for another number of turns")
    tensors = built[seq] if seq in built else tensors_of(made)
    if policy is not None:
        for segment in tensors:
            check(segment, policy)
    return _Slot(made, score, tensors, seq)
