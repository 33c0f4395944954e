import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms.rewards import (
    Judged,
    Shaped,
    broken_calls,
    concave,
    effort,
    open_todos,
    overlong,
    shaped,
    shaped_parts,
)
from headrace.messages.base import Array
from headrace.messages.judging import RubricScore, StepScore
from headrace.messages.rollout import TokenKinds, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from tests.support.records import of


def test_values_by_hand() -> None:
    assert concave(0.0, 0.01, 0.5) == 0.0
    assert concave(300.0, 0.01, 0.5) == pytest.approx((2.0 - 1.0) / 0.005)  # sqrt(1 + 3) = 2
    assert concave(7.0, 0.3, 0.0) == pytest.approx(7.0)  # q = 0 is linear
    assert concave(99.0, 1.0, 1.0) == pytest.approx(math.log(100.0))
    assert concave(3.0, 1.0, 2.0) == pytest.approx(0.75)  # (1/4 - 1) / -1


def test_q_near_one_meets_the_logarithm() -> None:
    assert concave(50.0, 0.1, 1.0 + 1e-9) == pytest.approx(concave(50.0, 0.1, 1.0), rel=1e-6)


@pytest.mark.parametrize("q", [0.3, 0.5, 1.0, 1.7])
def test_increasing_and_concave(q: float) -> None:
    values = [concave(float(x), 0.05, q) for x in range(200)]
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert all(step > 0 for step in steps)
    assert all(later < earlier for earlier, later in itertools.pairwise(steps))


def spent(tokens: int, calls: int, turns: int, kinds: TokenKinds | None = None) -> Judged:
    """A passed attempt with this effort."""
    return msgspec.structs.replace(attempt(), tokens=tokens, calls=calls, turns=turns, kinds=kinds)


def test_calls_in_one_turn_are_cheaper_than_in_two() -> None:
    assert effort(spent(40, 2, 1)) < effort(spent(40, 2, 2))
    assert effort(spent(10, 2, 3)) == 10 + 8 + 48


def test_reward_is_the_verdict_minus_the_price() -> None:
    assert shaped(spent(100, 3, 4)) == 1.0
    assert shaped(msgspec.structs.replace(spent(100, 3, 4), passed=False, verdict="failed")) == 0.0
    price = concave(100 + 12 + 64, 0.01, 0.5)
    assert shaped(spent(100, 3, 4), Shaped(length_penalty=1e-3)) == pytest.approx(1 - 1e-3 * price)


def test_each_kind_of_effort_has_its_weight_and_one_function_prices_the_sum() -> None:
    options = Shaped(
        length_thinking_tokens=0.5, length_call_tokens=2.0, length_text_tokens=3.0, length_calls=10.0,
        length_turns=70.0, length_penalty=1e-3,
    )  # fmt: skip
    judged = spent(100, 2, 1, TokenKinds(thinking=40, calls=30))
    assert effort(judged, options) == 0.5 * 40 + 2 * 30 + 3 * 30 + 10 * 2 + 70 * 1 == 260
    assert shaped_parts(judged, options) == {
        "verdict": 1.0,
        "effort": pytest.approx(-1e-3 * 200 * (math.sqrt(3.6) - 1)),
    }
    names = [name for name in Shaped.__struct_fields__ if name.startswith("length_") and name[7:] not in ("k", "q")]
    assert effort(judged, msgspec.convert(dict.fromkeys(names, 0.0), Shaped)) == 0.0


def test_tokens_without_a_count_by_kind_have_one_weight_or_no_price() -> None:
    assert effort(spent(100, 0, 0, None)) == effort(spent(100, 0, 0, TokenKinds(thinking=70, calls=20))) == 100
    with pytest.raises(ValueError, match="g-0-0 does not count its tokens by kind"):
        effort(spent(100, 0, 0, None), Shaped(length_thinking_tokens=0.5))


def test_refuses_what_is_outside() -> None:
    for x, k, q in ((-1.0, 1.0, 0.5), (1.0, 0.0, 0.5), (1.0, 1.0, -0.1)):
        with pytest.raises(ValueError, match="concave"):
            concave(x, k, q)


def test_overlong_falls_in_a_line_over_the_last_tokens() -> None:
    assert [overlong(tokens, 256, 64) for tokens in (0, 192, 208, 256, 900)] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert overlong(300, 256, 0) == 0.0


def attempt(*turns: tuple[ToolCall, ...], refused: frozenset[str] = frozenset()) -> Judged:
    """A passed attempt of these calls. refused: ids of calls whose tool gave no result."""
    made = [
        Turn(
            index=at,
            segment=0,
            prompt_ids=Array.of([], "<i4"),
            ids=Array.of([], "<i4"),
            logprobs=Array.of([], "<f4"),
            calls=calls,
            results=tuple(ToolResult(call_id=call.id, ok=call.id not in refused, output="") for call in calls),
        )
        for at, calls in enumerate(turns)
    ]
    trajectory = of(Trajectory, run="r", group="g", id="g-0-0", task=TaskRef("s", "t"), turns=tuple(made))
    return Judged(
        trajectory=trajectory,
        verdict="passed",
        passed=True,
        tests=(),
        suspicions=(),
        tokens=0,
        calls=sum(map(len, turns)),
        turns=len(turns),
        prices={},
    )


PENALTIES = Shaped(todo_penalty=0.2, broken_call_penalty=0.4)


def todo(id: str, items: str) -> ToolCall:
    return ToolCall(id=id, name="todo", arguments={"items": items})


def test_open_entries_of_the_last_list_cost_their_share() -> None:
    first, last = todo("0.0", "[ ] find\n[ ] mend"), todo("1.0", "[x] find\n[~] mend\n[x] test\n[x] lint\n")
    judged = attempt((first,), (last,))
    assert open_todos(judged.trajectory) == 0.25 and shaped(judged, PENALTIES) == pytest.approx(1 - 0.2 * 0.25)
    refused = attempt((first,), (last,), refused=frozenset({"1.0"}))
    assert open_todos(refused.trajectory) == 1.0, "a list that the tool refused is no list"
    assert shaped(attempt((ToolCall(id="0.0", name="finish"),)), PENALTIES) == 1.0


def test_broken_calls_cost_their_share() -> None:
    broken = ToolCall(id="1.0", name="", error="no call")
    judged = attempt((ToolCall(id="0.0", name="finish"), ToolCall(id="0.1", name="lint")), (broken,), (broken,))
    assert broken_calls(judged.trajectory) == 0.5 and shaped(judged, PENALTIES) == pytest.approx(0.8)
    assert broken_calls(attempt().trajectory) == 0.0


@given(
    value=st.one_of(st.none(), st.floats(-50.0, 50.0)),
    lowest=st.floats(-50.0, 0.0),
    rubric=st.floats(-3.0, 1.0),
    penalties=st.fixed_dictionaries(
        {name: st.sampled_from([0.0, 0.02, 1.5]) for name in ("length_penalty", "overlong_penalty", "todo_penalty")}
    ),
    weight=st.sampled_from([0.0, 0.3, 2.0]),
    tokens=st.integers(0, 200_000),
    steps=st.lists(st.floats(0.0, 0.4), max_size=3),
)
def test_no_end_but_success_is_worth_more_than_an_honest_failure(
    value: float | None,
    lowest: float,
    rubric: float,
    penalties: dict[str, float],
    weight: float,
    tokens: int,
    steps: list[float],
) -> None:
    """The same attempt under every end: refused output is strictly lower, a crash and a cheat are at most equal."""
    least = 0.0 if value is None else lowest
    scored = of(RubricScore, rubric="r", value=rubric)
    prices = {"rubric_weight": weight, "max_tokens": 100_000}
    options = msgspec.convert(penalties | {"overlong_tokens": 9}, Shaped)
    common = msgspec.structs.replace(attempt(), passed=False, tokens=tokens, rubric=scored, prices=prices, lowest=least)
    shares = tuple(StepScore(name=str(number), value=share, share=share) for number, share in enumerate(steps))
    given_value = None if value is None else max(value, least)
    honest = msgspec.structs.replace(common, verdict="failed", value=given_value, steps=shares)
    failure = shaped(honest, options)
    for decision in ("candidate_crash", "cheating"):
        other = msgspec.structs.replace(honest, verdict=decision)
        assert shaped(other, options) <= failure + 1e-9, decision
        unread = msgspec.structs.replace(common, verdict=decision, value=None)
        assert shaped(unread, options) <= failure + 1e-9, decision
    for refused in (honest, msgspec.structs.replace(common, verdict="failed", value=least if value else None)):
        assert shaped(msgspec.structs.replace(refused, refused=True), options) < failure
    if value is None and not steps:
        assert shaped(msgspec.structs.replace(honest, verdict="passed", passed=True), options) > failure
