from typing import Literal

import msgspec
import pytest

from headrace.config import Config, Evaluation
from headrace.ledger.training import evaluations

T1, GREEDY = 1.0, 0.0


@pytest.mark.parametrize(
    ("when", "greedy_too", "expected"),
    [
        ("before", False, [("heldout_before", T1), ("unseen_before", T1)]),
        (
            "before",
            True,
            [
                ("heldout_before", T1),
                ("heldout_before_greedy", GREEDY),
                ("unseen_before", T1),
                ("unseen_before_greedy", GREEDY),
            ],
        ),
        (
            "after",
            False,
            [
                ("heldout_after_t1", T1),
                ("heldout_after_greedy", GREEDY),
                ("unseen_after_t1", T1),
                ("unseen_after_greedy", GREEDY),
            ],
        ),
    ],
)
def test_what_a_run_measures(
    when: Literal["before", "after"], greedy_too: bool, expected: list[tuple[str, float]]
) -> None:
    config = msgspec.structs.replace(Config(), evaluation=Evaluation(before_greedy=greedy_too))
    asked = list(evaluations(config, "r1", when, 3))
    assert [(ask.reason, ask.sampling.temperature) for ask in asked] == expected
    assert {ask.policy.version for ask in asked} == {3} and len({ask.id for ask in asked}) == len(asked)
