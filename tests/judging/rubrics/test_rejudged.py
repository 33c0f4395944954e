"""Attempts judged again by another judge model: the command lists exactly the advantages whose sign changes."""

import pytest

from benchmarks.rejudge import measure


@pytest.mark.slow
def test_the_flips_that_the_command_lists_follow_from_the_weights_of_both_models() -> None:
    figures = measure(groups=12, size=8)
    assert figures["trajectories"] == 96 and figures["passed"] > 40
    assert figures["expected_flips"] > 0 and (figures["missing"], figures["wrong"]) == (0, 0)
    assert (figures["same_rewards_changed"], figures["same_flipped"], figures["same_requests"]) == (0, 0, 0)
