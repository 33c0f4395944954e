"""The time left comes from mid-training before attempts end, and from the attempts' own pace afterwards."""

import pytest

from headrace.config import Config, Curriculum, Evaluation, MidTraining
from headrace.config.policy import Policy
from headrace.dashboard import pace
from headrace.dashboard.pace import ATTEMPT_TOKENS, Pace
from headrace.messages.operations import LAST_PHASE, LEARNING, MID_TRAINING

RUN = Config(
    mid_training=MidTraining(tokens=1_000_000),
    curriculum=Curriculum(steps=10, groups_per_step=4, group_size=8),
    evaluation=Evaluation(heldout_tasks=40, unseen_tasks=10, every=5, every_tasks=20),
)
ATTEMPTS = 10 * 4 * 8 + 2 * 20 + 50 + 2 * 50
"""Of the steps, two evaluations during training, version 0 at temperature 1, the last version at two temperatures."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time moves when the test says so."""
    now = [1000.0]
    monkeypatch.setattr(pace, "monotonic", lambda: now[0])
    return now


def test_mid_training_tells_how_fast_the_machine_is(clock: list[float]) -> None:
    watched = Pace(RUN)
    assert watched.seconds_left("starting", 0.0, 0, (), 0.0) is None
    assert watched.seconds_left(MID_TRAINING, 100_000.0, 0, (), 0.0) is None, "a resumed one begins with tokens"
    clock[0] += 10.0
    a_token = 10.0 / 400_000
    left = watched.seconds_left(MID_TRAINING, 500_000.0, 0, (), 0.0)
    assert left == pytest.approx(a_token * (500_000 + ATTEMPT_TOKENS * ATTEMPTS))
    left = watched.seconds_left(LEARNING, 0.0, 0, (), 0.0)
    assert left == pytest.approx(a_token * ATTEMPT_TOKENS * ATTEMPTS), "no attempt has ended"


def test_a_checkpoint_of_others_has_no_time_left_before_its_first_attempts(clock: list[float]) -> None:
    watched = Pace(Config(policy=Policy(checkpoint="model"), curriculum=RUN.curriculum, evaluation=RUN.evaluation))
    watched.seconds_left(MID_TRAINING, 0.0, 0, (), 0.0)
    clock[0] += 10.0
    assert watched.seconds_left(MID_TRAINING, 1000.0, 0, (), 0.0) is None
    assert watched.seconds_left(LEARNING, 0.0, 0, (), 0.0) is None
    clock[0] += 10.0
    assert watched.seconds_left(LEARNING, 0.0, 0, (), 100.0) == pytest.approx((ATTEMPTS - 100) * 10.0 / 100)


def test_attempts_that_no_record_counts_yet_are_done_as_well(clock: list[float]) -> None:
    watched = Pace(RUN)
    watched.seconds_left(LEARNING, 0.0, 0, (), 0.0)
    clock[0] += 50.0
    left = watched.seconds_left(LEARNING, 0.0, 5, {"heldout-before"}, 250.0)
    assert left == pytest.approx((ATTEMPTS - 250) * 50.0 / 250)
    clock[0] += 50.0
    done = {"heldout-before", "unseen-before", "step-5-generated-heldout", "step-10-generated-heldout"}
    left = watched.seconds_left(LAST_PHASE, 0.0, 10, done, 410.0)
    assert left == pytest.approx(100 * 100.0 / 410)
    done |= {"heldout-after-t1", "heldout-after-greedy", "unseen-after-t1", "unseen-after-greedy"}
    assert watched.seconds_left(LAST_PHASE, 0.0, 10, done, 510.0) == 0.0


def test_a_command_that_begins_in_the_middle_of_a_run_takes_its_own_time_alone(clock: list[float]) -> None:
    watched = Pace(RUN)
    watched.seconds_left(LEARNING, 0.0, 0, (), 200.0)
    clock[0] += 20.0
    left = watched.seconds_left(LEARNING, 0.0, 5, {"heldout-before", "unseen-before"}, 300.0)
    assert left == pytest.approx((ATTEMPTS - 210) * 20.0 / 100)
