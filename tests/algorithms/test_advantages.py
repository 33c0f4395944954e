import math

import msgspec
import pytest

from headrace.algorithms.advantages import (
    Attempt,
    class_advantages,
    group_advantages,
    leave_one_out_advantages,
    normalised_advantages,
)
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from tests.test_docs import script

examples = script("messages").examples


def test_only_the_mean_is_taken_off() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    # GRPO's division by the standard deviation would give 1.73 and -0.58 here.


def test_the_baseline_is_that_of_the_survivors() -> None:
    assert group_advantages([1.0, 0.0]) == [0.5, -0.5]
    assert group_advantages([1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert group_advantages([0.7]) == [0.0]


def test_equal_rewards_are_no_signal_to_the_last_bit() -> None:
    assert sum([0.1] * 3) / 3 != 0.1  # the trap
    assert group_advantages([0.1] * 3) == [0.0] * 3


def test_order_changes_nothing() -> None:
    rewards = [0.1, 0.7, 0.2, 1.0, 0.3, 1e-9, 0.9]
    forward = dict(zip(rewards, group_advantages(rewards), strict=True))
    backward = dict(zip(reversed(rewards), group_advantages(rewards[::-1]), strict=True))
    assert forward == backward


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf, 0.0]])
def test_refuses_what_has_no_baseline(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=r"survivors|finite"):
        group_advantages(rewards)


def test_normalised_and_leave_one_out_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert normalised_advantages(rewards) == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rel=1e-5)
    assert leave_one_out_advantages(rewards) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    for advantage in (normalised_advantages, leave_one_out_advantages):
        assert advantage([0.1] * 3) == [0.0] * 3
        assert advantage([0.7]) == [0.0]


def test_a_group_of_128() -> None:
    advantages = group_advantages([float(number % 2) for number in range(128)])
    assert advantages == [-0.5, 0.5] * 64


def test_a_class_is_the_baseline_where_every_prompt_has_one_rollout() -> None:
    judged = [attempt("chat", 1.0), attempt("tests", 1.0), attempt("chat", 0.0), attempt("docs", 0.0)]
    assert class_advantages(judged) == [0.5, 0.5, -0.5, -0.5], "classes with one rollout share a baseline"
    assert class_advantages([attempt("chat", 1.0)]) == [0.0]


def attempt(family: str, reward: float) -> Attempt:
    made = msgspec.structs.replace(examples(Trajectory)[0], family=family)
    return Attempt(reward, made, examples(Score)[0])
