"""Builds a batch from trajectories and scores: one sequence per segment, token for token as it was sampled.

The idea: a segment's context is the concatenation of its turns' (prompt_ids, ids); nothing is tokenised again. The last
sampled token of a segment was never forwarded, so the inputs of a segment of n tokens are its first n - 1, and the
routed rows and the spans cover the same positions. Only sampled tokens have a loss, summaries included: the final
reward of a trajectory reaches every token that it sampled, in all its segments (self-summarisation as in Composer 2).
The reward of a turn reaches the tokens of that turn and of the turns before it (`advantages.to_go`).

A token's version is that of the span that forwarded the position before it, in the turn that sampled it. When a
trajectory moves to an engine that lacks its KV cache, that engine forwards the whole context again. The token after a
position was sampled from the position's first forward, so the routes of the first forward are replayed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.algorithms.advantages import class_advantages, group_advantages, to_go
from headrace.algorithms.registry import Advantage
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import Span, Trajectory, Turn
from headrace.messages.training import BatchGroup
from headrace.policy import moe

_DTYPES = {"|u1": torch.uint8, "<u2": torch.uint16, "<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}


class BatchError(ValueError):
    """A record cannot be trained on; the text names the trajectory and the fault."""


@dataclass(frozen=True)
class Segment:
    """One sequence: N inputs, and M sampled tokens among those that follow them."""

    trajectory: str
    ids: Tensor
    """int64 [N]: every position that was forwarded."""
    positions: Tensor
    """int64 [M]: inputs whose next token was sampled, ascending."""
    targets: Tensor
    """int64 [M]: the sampled tokens."""
    behaviour: Tensor
    """float32 [M]: the sampler's log-probabilities."""
    versions: Tensor
    """int64 [M]: the version that sampled each."""
    routed: Tensor | None
    """int64 [N, layers, top_k], rows of -1 where no record exists; None for a dense policy."""
    spans: tuple[Span, ...]
    """The spans of every forward, in the order of the record, cut to the N inputs; re-scoring repeats them."""
    advantage: float
    """Of the attempt's final reward, for every token."""
    temperature: float
    index: int = 0
    """Index among the segments of the batch."""
    turn_advantages: Tensor | None = None
    """float32 [M]: what the rewards of turns add to each token's advantage; None without such rewards."""

    @property
    def advantages(self) -> Tensor:
        """float32 [M]: the advantage of each token."""
        whole = torch.full((len(self.targets),), self.advantage)
        return whole if self.turn_advantages is None else whole + self.turn_advantages

    @property
    def trained(self) -> bool:
        """Whether any token has an advantage."""
        return self.advantage != 0.0 if self.turn_advantages is None else bool(self.advantages.any())


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

    def versions(self) -> list[int]:
        """The version of every sampled token, in the order of the segments."""
        return [version for segment in self.segments for version in segment.versions.tolist()]


def build(
    groups: Sequence[BatchGroup],
    trajectories: Mapping[int, Trajectory],
    scores: Mapping[int, Score],
    advantage: Advantage = group_advantages,
    *,
    by_class: bool = False,
) -> Batch:
    """The batch of a manifest. `trajectories` and `scores` are keyed by stream sequence.

    advantage: the function from a group's rewards to its slots' advantages, as in `algorithms.registry`. by_class: it
    gets the rewards of all rollouts of a task class in the batch instead (`class_advantages`). An attempt whose Score
    has a baseline of its own is compared with that alone. BatchError when a record is missing, belongs to another slot,
    or contradicts itself.
    """
    segments: list[Segment] = []
    rewards: list[float] = []
    fingerprints: set[str] = set()
    passed = 0
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
    for members in grouped:
        for trajectory, score in members:
            if score.by_turn is not None and len(score.by_turn.turns) != len(trajectory.turns):
                raise BatchError(f"trajectory {trajectory.id}: its score has rewards for another number of turns")
            value = next(finals) if score.baseline is None else score.final_reward - score.baseline
            turns = to_go([next(of_turns) for _ in score.turn_rewards])
            segments.extend(segments_of(trajectory, value, len(segments), turns))
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


def tensor(array: Array) -> Tensor:
    """A copy of a message's array as a tensor of its dtype, on the CPU."""
    if not array.data:
        return torch.empty(array.shape, dtype=_DTYPES[array.dtype])
    return torch.frombuffer(bytearray(array.data), dtype=_DTYPES[array.dtype]).reshape(array.shape)


def segments_of(
    trajectory: Trajectory, advantage: float = 0.0, first: int = 0, of_turns: Sequence[float] = ()
) -> list[Segment]:
    """The segments of one trajectory that hold sampled tokens, in order. first: index of the first one. of_turns: what
    the tokens of each turn get beside `advantage`; empty: nothing."""
    turns: dict[int, list[Turn]] = {}
    added: dict[int, list[float]] = {}
    for place, turn in enumerate(trajectory.turns):
        turns.setdefault(turn.segment, []).append(turn)
        if of_turns:
            added.setdefault(turn.segment, []).extend([of_turns[place]] * len(turn.ids))
    built = [_segment(trajectory, turns[number], advantage, added.get(number)) for number in sorted(turns)]
    sampled = (segment for segment in built if segment is not None)
    return [replace(segment, index=first + place) for place, segment in enumerate(sampled)]


def _segment(
    trajectory: Trajectory, turns: Sequence[Turn], advantage: float, added: Sequence[float] | None = None
) -> Segment | None:
    parts: list[Tensor] = []
    positions: list[Tensor] = []
    versions: list[int] = []
    length = covered = 0
    for turn in turns:
        parts += [tensor(turn.prompt_ids).long(), tensor(turn.ids).long()]
        start = length + len(turn.prompt_ids)
        length = start + len(turn.ids)
        if not len(turn.ids):
            continue  # the engine returned no token, or the trajectory ended after tool results
        if start == 0:
            raise BatchError(f"trajectory {trajectory.id}: turn {turn.index} sampled without a context")
        if len(turn.logprobs) != len(turn.ids):
            raise BatchError(f"trajectory {trajectory.id}: turn {turn.index} lacks log-probabilities")
        positions.append(torch.arange(start - 1, length - 1))
        versions += _versions(trajectory, turn, start - 1, length - 1)
        covered = length - 1
    if not positions:
        return None
    at = torch.cat(positions)
    ids = torch.cat(parts)
    return Segment(
        trajectory=trajectory.id,
        ids=ids[:covered],
        positions=at,
        targets=ids[at + 1],
        behaviour=torch.cat([tensor(turn.logprobs).float() for turn in turns if len(turn.ids)]),
        versions=torch.tensor(versions),
        routed=_routed(trajectory, turns, covered),
        spans=tuple(_spans(turns, covered)),
        advantage=advantage,
        temperature=trajectory.sampling.temperature,
        turn_advantages=None if added is None else torch.tensor(added),
    )


def _versions(trajectory: Trajectory, turn: Turn, start: int, end: int) -> list[int]:
    """The version that forwarded each of the positions start..end-1 in this turn."""
    versions = [span.version for at in range(start, end) for span in turn.spans if span.start <= at < span.end]
    if len(versions) != end - start or min(versions) < 0:
        raise BatchError(f"trajectory {trajectory.id}: the spans of turn {turn.index} do not cover what it sampled")
    return versions


def _routed(trajectory: Trajectory, turns: Sequence[Turn], covered: int) -> Tensor | None:
    """int64 [covered, layers, top_k]: routes of positions 0..covered-1, -1 where none was recorded; None without any.
    Where a position was forwarded several times, the first forward counts."""
    parts: list[tuple[int, Tensor]] = []
    adjoining, filled = True, 0
    for turn in turns:
        if turn.routed is None or not turn.spans:
            continue
        narrow = tensor(turn.routed)
        start, end = turn.spans[0].start, turn.spans[-1].end
        if narrow.shape[0] != end - start:
            raise BatchError(f"trajectory {trajectory.id}: turn {turn.index} has routes for other positions than spans")
        same = not parts or (narrow.dtype, narrow.shape[1:]) == (parts[0][1].dtype, parts[0][1].shape[1:])
        adjoining, filled = adjoining and same and start == filled, end
        parts.append((start, narrow))
    if not parts:
        return None
    shape = parts[0][1].shape[1:]
    if adjoining and filled >= covered:  # as usual: every position once; widened at once, the routes are copied once
        return moe.widen(torch.cat([narrow for _, narrow in parts])[:covered], *shape)
    rows = torch.full((covered, *shape), -1)
    for start, narrow in parts:
        routed = moe.widen(narrow, *narrow.shape[1:])
        target = rows[start : start + len(routed)]  # shorter where the segment ends on a turn that sampled nothing
        new = target[:, 0, 0] < 0
        target[new] = routed[: len(target)][new]
    return rows


def _spans(turns: Sequence[Turn], covered: int) -> list[Span]:
    """Spans of all turns in record order, cut to `covered` positions; adjacent spans of one version become one."""
    spans: list[Span] = []
    for span in (span for turn in turns for span in turn.spans if span.start < covered):
        if spans and spans[-1].version == span.version and spans[-1].end == span.start:
            spans[-1] = Span(spans[-1].start, min(span.end, covered), span.version)
        else:
            spans.append(Span(span.start, min(span.end, covered), span.version))
    return spans
