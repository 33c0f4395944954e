"""Segments: trajectories as tensors, one sequence per segment, token for token as it was sampled.

The idea: a segment's context is the concatenation of its turns' (prompt_ids, ids); nothing is tokenised again. The last
sampled token of a segment was never forwarded, so the inputs of a segment of n tokens are its first n - 1, and the
routed rows and the spans cover the same positions. Routes stay as small as in the record until a micro-batch is on its
device: widened they take eight times the memory.

A token's version is that of the span that forwarded the position before it, in the turn that sampled it. When a
trajectory moves to an engine that lacks its KV cache, that engine forwards the whole context again. The token after a
position was sampled from the position's first forward, so the routes of the first forward are replayed.

Advantages need the scores of a whole group, tensors only the trajectory. So `tensors_of` may run as soon as the record
has arrived (`ahead`), and `weighted` adds the advantages in the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.messages.base import Array
from headrace.messages.rollout import Span, Trajectory, Turn
from headrace.policy import moe
from headrace.policy.config import PolicyConfig

_DTYPES = {"|u1": torch.uint8, "<u2": torch.uint16, "<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}


CUT_OFF = ("context", "max_tokens", "max_turns")
"""Outcomes of attempts that a limit of length ended. The others are no matter of length: `wall_time` and
`sandbox_limit` end what is slow or large, `cancelled` is a user's choice."""


class BatchError(HeadraceError, ValueError):
    """A record cannot be trained on; the text names the trajectory and the fault."""

    def __init__(self, text: str, reason: str = "bad_record") -> None:
        """reason: as in `LeftOut`."""
        super().__init__(text)
        self.reason = reason


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
    """[N, layers, top_k] in the dtype of the record, as `moe.widen` reads it; None for a dense policy."""
    spans: tuple[Span, ...]
    """The spans of every forward, in the order of the record, cut to the N inputs; re-scoring repeats them."""
    advantage: float
    """Of the attempt's final reward, for every token."""
    temperature: float
    index: int = 0
    """Index among the segments of the batch."""
    largest_expert: int = -1
    """The largest that `routed` names; `check` compares it with the policy."""
    largest_id: int = 0
    """The largest token id of `ids` and `targets`."""
    cut_off: bool = False
    """Whether a limit of length ended the attempt (`cut_off`)."""
    turn_advantages: Tensor | None = None
    """float32 [M]: what the rewards of turns add to each token's advantage; None without such rewards."""

    @property
    def routes(self) -> Tensor | None:
        """`routed` as int64, with rows of -1 where no record exists."""
        return None if self.routed is None else moe.widen(self.routed, *self.routed.shape[1:])

    @property
    def advantages(self) -> Tensor:
        """float32 [M]: the advantage of each token."""
        whole = torch.full((len(self.targets),), self.advantage)
        return whole if self.turn_advantages is None else whole + self.turn_advantages

    @property
    def trained(self) -> bool:
        """Whether any token has an advantage."""
        return self.advantage != 0.0 if self.turn_advantages is None else bool(self.advantages.any())


def cut_off(trajectory: Trajectory) -> bool:
    """Whether a limit of length ended the attempt: its outcome is one of `CUT_OFF`, or the last reply of a client's
    session reached its limit or was cut by the client."""
    session = trajectory.capture is not None and any(turn.stop != "stop" for turn in trajectory.turns[-1:])
    return session or trajectory.outcome in CUT_OFF


def tensor(array: Array) -> Tensor:
    """A copy of a message's array as a tensor of its dtype, on the CPU."""
    if not array.data:
        return torch.empty(array.shape, dtype=_DTYPES[array.dtype])
    return torch.frombuffer(bytearray(array.data), dtype=_DTYPES[array.dtype]).reshape(array.shape)


def tensors_of(trajectory: Trajectory) -> list[Segment]:
    """The segments of one trajectory that hold sampled tokens, in order, without advantages. BatchError."""
    try:
        built = [_segment(trajectory, turns) for turns in _by_segment(trajectory)]
    except BatchError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:  # of arrays that do not fit
        raise BatchError(f"trajectory {trajectory.id}: {type(error).__name__}: {error}") from error
    return [segment for segment in built if segment is not None]


def check(segment: Segment, policy: PolicyConfig) -> None:
    """BatchError when the policy cannot compute a segment: ids that it does not have, or routes that are missing or
    name other experts. Routes computed here may differ from the sampler's."""
    name, experts = f"trajectory {segment.trajectory}", policy.experts
    if segment.largest_id >= policy.vocab:
        raise BatchError(f"{name} holds token id {segment.largest_id}, the policy has {policy.vocab}")
    if not experts:
        return
    if segment.routed is None:
        raise BatchError(f"{name} carries no routed experts", "routes_missing")
    if (shape := tuple(segment.routed.shape[1:])) != (policy.sparse_layers, policy.top_k):
        wanted = f"{policy.sparse_layers} layers and top {policy.top_k}"
        raise BatchError(f"{name} has routes of shape {list(shape)}, expected {wanted}", "routes_missing")
    if segment.largest_expert >= experts:
        raise BatchError(
            f"{name} names expert {segment.largest_expert}, the policy has {experts} in a layer; its sampler serves "
            "another model",
            "routes_missing",
        )


def weighted(
    segments: Sequence[Segment],
    trajectory: Trajectory,
    advantage: float,
    first: int = 0,
    of_turns: Sequence[float] = (),
) -> list[Segment]:
    """`tensors_of` a trajectory with advantages. first: index of the first segment. of_turns: what the tokens of each
    turn get beside `advantage`; empty: nothing."""
    harness = trajectory.harness or None
    numbers = sorted({turn.segment for turn in trajectory.turns if len(turn.ids)})
    silent = set(harness.unrewarded) if harness is not None else set()
    added: dict[int, list[float]] = {}
    for value, turn in zip(of_turns, trajectory.turns, strict=bool(of_turns)):
        if len(turn.ids):
            added.setdefault(turn.segment, []).extend([value] * len(turn.ids))
    return [
        replace(
            segment,
            advantage=0.0 if number in silent else advantage,
            index=first + place,
            turn_advantages=torch.tensor(added[number]) if number in added and number not in silent else None,
        )
        for place, (segment, number) in enumerate(zip(segments, numbers, strict=True))
    ]


def _by_segment(trajectory: Trajectory) -> list[list[Turn]]:
    """The turns of each segment, in order."""
    turns: dict[int, list[Turn]] = {}
    for turn in trajectory.turns:
        turns.setdefault(turn.segment, []).append(turn)
    return [turns[number] for number in sorted(turns)]


def _segment(trajectory: Trajectory, turns: Sequence[Turn]) -> Segment | None:
    parts: list[Tensor] = []
    positions: list[Tensor] = []
    versions: list[Tensor] = []
    length = covered = 0
    for turn in turns:
        parts += [tensor(turn.prompt_ids), tensor(turn.ids)]
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
    ids = torch.cat(parts).long()
    behaviour = torch.cat([tensor(turn.logprobs) for turn in turns if len(turn.ids)]).float()
    if not torch.isfinite(behaviour).all():
        raise BatchError(f"trajectory {trajectory.id}: a log-probability is not finite", "logprobs_not_finite")
    if int(ids.min()) < 0:
        raise BatchError(f"trajectory {trajectory.id}: token id {int(ids.min())}")
    routed = _routed(trajectory, turns, covered)
    try:
        largest = -1 if routed is None else moe.largest(routed)
    except moe.RoutesMissing as error:
        raise BatchError(f"trajectory {trajectory.id}: {error}") from None
    return Segment(
        trajectory=trajectory.id,
        ids=ids[:covered],
        positions=at,
        targets=ids[at + 1],
        behaviour=behaviour,
        versions=torch.cat(versions),
        routed=routed,
        spans=tuple(_spans(turns, covered)),
        advantage=0.0,
        temperature=trajectory.sampling.temperature,
        largest_expert=largest,
        cut_off=cut_off(trajectory),
        largest_id=int(ids.max()),
    )


def _versions(trajectory: Trajectory, turn: Turn, start: int, end: int) -> list[Tensor]:
    """The version that forwarded each of the positions start..end-1 first in this turn, by runs of equal ones."""
    runs: list[Tensor] = []
    at = start
    for span in turn.spans:
        last = min(span.end, end)
        if last <= at:
            continue  # positions before, or forwarded again
        if span.start > at or span.version < 0:
            break  # a gap, or no version
        runs.append(torch.full((last - at,), span.version))
        at = last
    else:
        if at == end:
            return runs
    raise BatchError(f"trajectory {trajectory.id}: the spans of turn {turn.index} do not cover what it sampled")


def _routed(trajectory: Trajectory, turns: Sequence[Turn], covered: int) -> Tensor | None:
    """Routes of positions 0..covered-1, [covered, layers, top_k]; None without any. Where a position was forwarded
    several times, the first forward counts."""
    parts: list[tuple[int, Tensor]] = []
    adjoining, filled = True, 0
    for turn in turns:
        if turn.routed is None or not turn.spans:
            continue
        narrow = tensor(turn.routed)
        start, end = turn.first_routed, turn.spans[-1].end
        if narrow.shape[0] != end - start:
            raise BatchError(f"trajectory {trajectory.id}: turn {turn.index} has routes for other positions than spans")
        same = not parts or (narrow.dtype, narrow.shape[1:]) == (parts[0][1].dtype, parts[0][1].shape[1:])
        adjoining, filled = adjoining and same and start == filled, end
        parts.append((start, narrow))
    if not parts:
        return None
    if adjoining and filled >= covered:  # as usual: every position once
        return torch.cat([narrow for _, narrow in parts])[:covered]
    rows = torch.full((covered, *parts[0][1].shape[1:]), -1)
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
