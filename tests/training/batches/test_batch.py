import dataclasses
from collections.abc import Sequence
from typing import get_args, get_type_hints

import msgspec
import pytest
import torch

from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import Capture, Span, Trajectory, Turn, routes_end, versions
from headrace.messages.tasks import TaskRef
from headrace.messages.training import BatchGroup
from headrace.training.batches.batch import build
from headrace.training.batches.segment import BatchError
from tests.support.records import of
from tests.support.segments import segments_of

TASK = TaskRef("generated/dev", "10001")


def turn(
    index: int, prompt: Sequence[int], ids: Sequence[int], spans: Sequence[Span], segment: int = 0, first: int = 0
) -> Turn:
    """A turn whose routes at position i are experts i and i + 100 in both layers, plus `first`."""
    rows = [value for span in spans for at in range(span.start, span.end) for value in [at + first, at + 100] * 2]
    return Turn(
        index=index,
        segment=segment,
        prompt_ids=Array.of(prompt, "<i4"),
        ids=Array.of(ids, "<i4"),
        logprobs=Array.of([-0.5 - i for i in ids], "<f4"),
        routed=Array.of(rows, "|u1", (len(rows) // 4, 2, 2)),
        spans=tuple(spans),
    )


def trajectory(*turns: Turn, group: str = "g000000", slot: int = 0) -> Trajectory:
    return of(
        Trajectory, run="r", group=group, slot=slot, id=f"{group}-{slot}-0", task=TASK, turns=turns, fingerprint="f"
    )


def score(made: Trajectory, reward: float) -> Score:
    return of(
        Score,
        run="r",
        group=made.group,
        slot=made.slot,
        attempt=made.attempt,
        task=TASK,
        verdict="passed" if reward > 0 else "failed",
        reward=reward,
        passed=reward > 0,
    )


TWO_TURNS = (
    turn(0, [10, 11, 12], [20, 21], [Span(0, 4, 5)]),
    # Position 4 holds token 21, which had no forward in turn 0. The swap to version 6 came at position 6.
    turn(1, [13, 14], [22, 23, 24], [Span(4, 6, 5), Span(6, 9, 6)]),
)


def test_tokens_meet_what_was_sampled_after_them() -> None:
    (segment,) = segments_of(trajectory(*TWO_TURNS), 0.25)
    assert segment.ids.tolist() == [10, 11, 12, 20, 21, 13, 14, 22, 23]  # 24 was never forwarded
    assert segment.positions.tolist() == [2, 3, 6, 7, 8]
    assert segment.targets.tolist() == [20, 21, 22, 23, 24]
    assert segment.behaviour.tolist() == [-20.5, -21.5, -22.5, -23.5, -24.5]
    assert segment.advantage == 0.25


def test_a_token_belongs_to_the_version_that_forwarded_the_position_before_it() -> None:
    (segment,) = segments_of(trajectory(*TWO_TURNS))
    assert segment.versions.tolist() == [5, 5, 6, 6, 6]
    assert segment.spans == (Span(0, 6, 5), Span(6, 9, 6))


def test_routes_cover_every_input() -> None:
    (segment,) = segments_of(trajectory(*TWO_TURNS))
    assert segment.routes is not None
    assert segment.routes.shape == (9, 2, 2)
    assert segment.routes[:, 0, 0].tolist() == list(range(9))


def test_wide_routes_of_adjoining_turns_are_joined_and_name_no_expert_by_minus_one() -> None:
    wide = [
        msgspec.structs.replace(made, routed=Array.of(rows, "<u2", (len(rows) // 4, 2, 2)))
        for made in TWO_TURNS
        if made.routed is not None
        for rows in [[0xFFFF, *(300 + expert for expert in made.routed.data[1:])]]
    ]
    (segment,) = segments_of(trajectory(*wide))
    (narrow,) = segments_of(trajectory(*TWO_TURNS))
    assert segment.routes is not None and narrow.routes is not None
    start = TWO_TURNS[1].spans[0].start
    want = narrow.routes + 300
    want[0, 0, 0] = want[start, 0, 0] = -1
    assert torch.equal(segment.routes, want)


def test_after_a_move_without_kv_the_first_forward_wrote_the_token() -> None:
    moved = turn(1, [13, 14], [22, 23, 24], [Span(0, 9, 6)], first=30)
    (segment,) = segments_of(trajectory(TWO_TURNS[0], moved))
    assert segment.spans == (Span(0, 4, 5), Span(0, 9, 6))
    assert segment.versions.tolist() == [5, 5, 6, 6, 6]
    assert segment.routes is not None
    assert segment.routes[:, 0, 0].tolist() == [0, 1, 2, 3, 34, 35, 36, 37, 38]  # the first forward counts


def test_routes_with_a_start_of_their_own_give_the_same_tensors() -> None:
    moved = turn(1, [13, 14], [22, 23, 24], [Span(0, 9, 6)], first=30)
    assert moved.routed is not None
    new = Array("|u1", (5, 2, 2), moved.routed.data[4 * 4 :])
    later = msgspec.structs.replace(moved, routed=new, routed_start=4)
    (whole,), (short,) = segments_of(trajectory(TWO_TURNS[0], moved)), segments_of(trajectory(TWO_TURNS[0], later))
    for field in dataclasses.fields(whole):
        if field.name != "routed":  # widened where positions have several records
            left, right = getattr(whole, field.name), getattr(short, field.name)
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert whole.routes is not None and short.routes is not None and torch.equal(whole.routes, short.routes)
    assert short.routed is not None and short.routed.dtype == torch.uint8
    ends = [routes_end(turns, 0) for turns in ((), TWO_TURNS[:1], (TWO_TURNS[0], moved), (TWO_TURNS[0], later))]
    assert ends == [0, 4, 9, 9] and routes_end(TWO_TURNS, 1) == 0
    gap = turn(0, [10, 11, 12], [20, 21], [Span(2, 4, 5)])
    assert routes_end([gap], 0) == 0, "positions without routes come first"


def test_a_context_that_one_turn_forwarded_twice_belongs_to_the_first_forward() -> None:
    once = turn(0, [10, 11, 12], [20, 21, 22], [Span(0, 5, 6)])
    twice = msgspec.structs.replace(once, spans=(Span(0, 4, 5), Span(0, 5, 6)))
    (segment,) = segments_of(trajectory(twice))
    assert segment.versions.tolist() == versions(trajectory(twice).turns) == [5, 5, 6]
    assert segment.spans == (Span(0, 4, 5), Span(0, 5, 6))
    assert segment.routes is not None and segment.routes[:, 0, 0].tolist() == list(range(5))


def test_a_cached_prefix_has_no_routes() -> None:
    (segment,) = segments_of(trajectory(turn(0, [10, 11, 12], [20, 21], [Span(2, 4, 5)])))
    assert segment.routes is not None
    assert segment.routes[:, 0, 0].tolist() == [-1, -1, 2, 3]


def test_segments_are_apart_and_all_get_the_reward() -> None:
    summary = turn(1, [90], [30, 31], [Span(4, 7, 5)], segment=0)
    after = turn(2, [10, 11, 30, 31], [40], [Span(0, 4, 6)], segment=1)
    first, second = segments_of(trajectory(TWO_TURNS[0], summary, after), -0.5)
    assert first.targets.tolist() == [20, 21, 30, 31]
    assert second.ids.tolist() == [10, 11, 30, 31]
    assert second.targets.tolist() == [40]
    assert first.advantage == second.advantage == -0.5


def test_a_turn_without_tokens_adds_nothing() -> None:
    empty = turn(2, [15, 16], [], [])
    (with_it,), (without,) = segments_of(trajectory(*TWO_TURNS, empty)), segments_of(trajectory(*TWO_TURNS))
    for field in dataclasses.fields(with_it):
        left, right = getattr(with_it, field.name), getattr(without, field.name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert segments_of(trajectory(empty)) == []


def test_batch_in_manifest_order_with_group_advantages() -> None:
    made = {seq: trajectory(TWO_TURNS[0], group=f"g{seq // 10}", slot=seq % 10) for seq in (10, 11, 12, 20, 21)}
    scores = {seq + 100: score(t, float(seq in (10, 20, 21))) for seq, t in made.items()}
    groups = (
        BatchGroup(group="g2", close_seq=1, slots=((20, 120), (21, 121))),
        BatchGroup(group="g1", close_seq=2, slots=((10, 110), (11, 111), (12, 112))),
    )
    batch = build(groups, made, scores)
    assert [segment.advantage for segment in batch.segments] == pytest.approx([0, 0, 2 / 3, -1 / 3, -1 / 3])
    assert (batch.trajectories, batch.passed, batch.tokens, batch.groups) == (5, 3, 10, ("g2", "g1"))
    assert batch.versions() == {5: 10}


def test_a_reward_with_a_baseline_of_its_own_is_compared_with_that_alone() -> None:
    made = {seq: trajectory(TWO_TURNS[0], group=f"g{seq}") for seq in (1, 2, 3)}
    scores = {seq + 100: score(t, float(seq < 3)) for seq, t in made.items()}
    scores[101] = msgspec.structs.replace(scores[101], baseline=0.75)
    groups = tuple(BatchGroup(group=f"g{seq}", close_seq=seq, slots=((seq, seq + 100),)) for seq in made)
    batch = build(groups, made, scores, by_class=True)
    assert [segment.advantage for segment in batch.segments] == pytest.approx([0.25, 0.5, -0.5])


def test_refuses_records_that_contradict_each_other() -> None:
    good = trajectory(*TWO_TURNS)
    group = (BatchGroup(group="g000000", close_seq=1, slots=((1, 2),)),)
    with pytest.raises(BatchError, match="missing"):
        build(group, {}, {2: score(good, 1.0)})
    with pytest.raises(BatchError, match="another slot"):
        build(group, {1: good}, {2: msgspec.structs.replace(score(good, 1.0), slot=1)})
    for bad, what in (
        (msgspec.structs.replace(TWO_TURNS[0], logprobs=Array.of([-1.0], "<f4")), "lacks log-probabilities"),
        (msgspec.structs.replace(TWO_TURNS[0], spans=(Span(0, 3, 5),), routed=None), "do not cover"),
        (msgspec.structs.replace(TWO_TURNS[0], spans=(Span(0, 4, 5),), routed=TWO_TURNS[1].routed), "other positions"),
        (
            msgspec.structs.replace(TWO_TURNS[0], routed=Array.of([5, 255] * 8, "|u1", (4, 2, 2))),
            r"routes name the experts \[5, 255\] of a token",
        ),
    ):
        with pytest.raises(BatchError, match=what):
            segments_of(trajectory(bad))


@pytest.mark.parametrize("outcome", get_args(get_type_hints(Trajectory)["outcome"]))
def test_a_limit_of_length_cuts_an_attempt_off(outcome: str) -> None:
    made = msgspec.structs.replace(trajectory(*TWO_TURNS), outcome=outcome)
    (segment,) = segments_of(made, 1.0)
    assert segment.cut_off == (outcome in {"context", "max_tokens", "max_turns"})


def test_a_session_whose_last_reply_reached_its_limit_is_cut_off() -> None:
    """A client ends its session itself, so its outcome is always finished; an agent's own turn may reach its limit and
    be followed by others."""
    first, last = (msgspec.structs.replace(each, stop="length") for each in TWO_TURNS)
    session = Capture(training_allowed=True)
    for turns, capture, expected in (
        ((TWO_TURNS[0], last), session, True),
        ((first, TWO_TURNS[1]), session, False),
        ((TWO_TURNS[0], last), None, False),
    ):
        made = msgspec.structs.replace(trajectory(*turns), capture=capture)
        assert [segment.cut_off for segment in segments_of(made, 1.0)] == [expected]


def test_an_attempt_that_is_cut_off_stays_in_its_groups_baseline() -> None:
    attempts = [trajectory(*TWO_TURNS, slot=slot) for slot in range(3)]
    attempts[2] = msgspec.structs.replace(attempts[2], outcome="max_tokens")
    records = {slot + 1: attempt for slot, attempt in enumerate(attempts)}
    scores = {11 + slot: score(attempt, 1.0 - slot / 2) for slot, attempt in enumerate(attempts)}
    group = BatchGroup(group="g000000", close_seq=1, slots=((1, 11), (2, 12), (3, 13)))
    batch = build([group], records, scores)
    assert [(segment.advantage, segment.cut_off) for segment in batch.segments] == [
        (0.5, False),
        (0.0, False),
        (-0.5, True),
    ]
