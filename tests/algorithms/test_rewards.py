import itertools
import math

import pytest

from headrace.algorithms.rewards import (
    Judged,
    broken_calls,
    concave,
    effort,
    open_todos,
    overlong,
    shaped,
    shaped_reward,
)
from headrace.messages.base import Array
from headrace.messages.rollout import PolicyRef, Sampling, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.tasks import TaskRef


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


def test_calls_in_one_turn_are_cheaper_than_in_two() -> None:
    assert effort(tokens=40, calls=2, turns=1) < effort(tokens=40, calls=2, turns=2)
    assert effort(10, 2, 3) == 10 + 8 + 48


def test_reward_is_the_verdict_minus_the_price() -> None:
    assert shaped_reward(True, tokens=100, calls=3, turns=4) == 1.0
    assert shaped_reward(False, tokens=100, calls=3, turns=4) == 0.0
    price = concave(effort(100, 3, 4), 0.01, 0.5)
    assert shaped_reward(True, tokens=100, calls=3, turns=4, weight=1e-3) == pytest.approx(1 - 1e-3 * price)


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
    trajectory = Trajectory(
        run="r",
        lane="train",
        group="g",
        slot=0,
        attempt=0,
        id="g-0-0",
        task=TaskRef("s", "t"),
        family="f",
        seed=0,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=tuple(made),
        diff={},
    )
    options = {
        "length_penalty": 0.0,
        "length_k": 0.01,
        "length_q": 0.5,
        "todo_penalty": 0.2,
        "broken_call_penalty": 0.4,
    }
    return Judged(
        trajectory=trajectory,
        verdict="passed",
        passed=True,
        tests=(),
        suspicions=(),
        tokens=0,
        calls=sum(map(len, turns)),
        turns=len(turns),
        options=options,
    )


def todo(id: str, items: str) -> ToolCall:
    return ToolCall(id=id, name="todo", arguments={"items": items})


def test_open_entries_of_the_last_list_cost_their_share() -> None:
    first, last = todo("0.0", "[ ] find\n[ ] mend"), todo("1.0", "[x] find\n[~] mend\n[x] test\n[x] lint\n")
    judged = attempt((first,), (last,))
    assert open_todos(judged.trajectory) == 0.25 and shaped(judged) == pytest.approx(1 - 0.2 * 0.25)
    refused = attempt((first,), (last,), refused=frozenset({"1.0"}))
    assert open_todos(refused.trajectory) == 1.0, "a list that the tool refused is no list"
    assert shaped(attempt((ToolCall(id="0.0", name="finish"),))) == 1.0


def test_broken_calls_cost_their_share() -> None:
    broken = ToolCall(id="1.0", name="", error="no call")
    judged = attempt((ToolCall(id="0.0", name="finish"), ToolCall(id="0.1", name="lint")), (broken,), (broken,))
    assert broken_calls(judged.trajectory) == 0.5 and shaped(judged) == pytest.approx(0.8)
    assert broken_calls(attempt().trajectory) == 0.0
