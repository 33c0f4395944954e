"""Refusals, the alarm, and a policy that really collapses: detected, rolled back, and the same after a restart."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.config import Algorithm, Config
from headrace.training.guard import BatchMetrics, Guard, StateSnapshot, alarm, refusal
from headrace.training.outcome import StepOutcome
from headrace.training.state import TrainerState
from headrace.training.trainer import PolicyTrainer
from tests.support.world import CONFIG, TOKENIZER, batch, model
from tests.training.test_mid_training import texts

WATCHED = Algorithm(guard_k1=0.05, guard_patience=3)
CALM = [BatchMetrics(0.01, 0.8, 2.0), BatchMetrics(0.02, 0.6, 2.2)]


@pytest.mark.parametrize(
    ("loss", "norm", "k1", "reason"),
    [
        (0.1, 1.0, 0.01, ""),
        (math.nan, 1.0, 0.0, "loss_not_finite"),
        (0.1, math.inf, 0.0, "gradient_not_finite"),
        (0.1, 1.0, math.nan, "mismatch_not_finite"),
        (0.1, 51.0, 0.0, "gradient_spike"),
    ],
)
def test_reasons(loss: float, norm: float, k1: float, reason: str) -> None:
    assert refusal(loss, norm, k1, max_gradient_norm=50.0) == reason


def test_zero_is_no_limit() -> None:
    assert refusal(0.1, 1e9, 9.0) == ""


@pytest.mark.parametrize(
    ("now", "over", "said"),
    [
        (BatchMetrics(0.05, 0.0, 0.0), 9, ""),  # k1 alone decides whether anything is wrong at all
        (BatchMetrics(0.06, 0.7, 2.0), 0, ""),
        (BatchMetrics(0.06, 0.7, 2.0), 1, ""),
        (BatchMetrics(0.06, 0.7, 2.0), 2, "k1 0.06 is above 0.05 for 3 steps"),
        (BatchMetrics(0.06, 0.34, 2.0), 0, "the reward fell from 0.7 to 0.34"),
        (BatchMetrics(0.06, 0.36, 2.0), 0, ""),
        (BatchMetrics(0.06, 0.7, 1.0), 0, "the entropy went from 2.1 to 1"),
        (BatchMetrics(0.06, 0.7, 4.3), 0, "the entropy went from 2.1 to 4.3"),
    ],
)
def test_k1_warns_and_reward_or_entropy_confirm(now: BatchMetrics, over: int, said: str) -> None:
    warning = alarm(now, CALM, over, WATCHED)
    assert said in warning and bool(said) == bool(warning)


def test_without_anything_calm_only_patience_decides() -> None:
    assert alarm(BatchMetrics(9.0, 0.0, 0.0), [], 1, WATCHED) == ""
    assert alarm(BatchMetrics(9.0, 0.0, 0.0), [], 2, WATCHED)


def test_a_copy_is_good_only_after_further_calm_batches() -> None:
    state, guard = TrainerState(model()), Guard()
    calm, high = BatchMetrics(0.0, 0.5, 2.0), BatchMetrics(0.06, 0.5, 2.0)
    for version in range(6):
        state.version = version
        assert guard.look(state, high if version == 1 else calm, WATCHED, bound=1) == ""
        held = [copy.version if copy is not None else -1 for copy in (guard.good, guard.candidate)]
        assert held == [[-1, 0], [-1, 0], [0, 2], [0, 2], [2, 4], [2, 4]][version]


def test_a_rollback_puts_weights_and_optimizer_back_and_never_reuses_a_number() -> None:
    state, guard = TrainerState(model()), Guard()
    guard.good = StateSnapshot.of(state)
    before = state.hash()
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.apply(0.1)
    state.version = 7
    assert state.hash() != before
    assert guard.roll_back(state, WATCHED) == 0
    assert (state.hash(), state.step, state.version) == (before, 0, 7)
    assert not state.optimizer.moments
    assert guard.factor == 0.5
    assert guard.refuses([8, 9]) == ""
    assert guard.refuses([8, 3]) == "version 3 wrote a token and was taken back"
    state.version = 9
    assert guard.roll_back(state, WATCHED) == 8, "the number that the good bytes have now"
    assert guard.discarded == [(1, 7), (9, 9)]
    assert guard.refuses([8]) == ""


def test_nothing_good_is_held_in_the_first_steps() -> None:
    state, guard = TrainerState(model()), Guard()
    before = state.hash()
    assert guard.roll_back(state, WATCHED) == -1
    assert (state.hash(), guard.discarded, guard.factor) == (before, [], 0.5)


def test_a_memory_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the state of a guard"):
        Guard.load({"calm": []}, {})


LAG = 2


def collapsing(guard_k1: float) -> Config:
    """A rate that rises until the policy can no longer follow its own samples, two versions old."""
    rising = {"learning_rate": 0.5, "warmup_steps": 40, "guard_k1": guard_k1, "guard_backoff": 0.1}
    return msgspec.structs.replace(
        CONFIG,
        algorithm=msgspec.structs.replace(CONFIG.algorithm, **rising),
        curriculum=msgspec.structs.replace(CONFIG.curriculum, staleness=LAG, group_size=4, groups_per_step=2),
    )


def prepare(folder: Path, config: Config) -> PolicyTrainer:
    return PolicyTrainer.prepare(config, folder, tokenizer_json=TOKENIZER, traces=texts)


def steps(trainer: PolicyTrainer, until: int) -> list[StepOutcome]:
    """Samples begin under the oldest version that is allowed and end under the current one."""
    outcomes = []
    while trainer.version < until:
        now = trainer.version
        models = dict(trainer.versions)
        old = max(0, now - LAG)
        outcomes.append(trainer.step(*batch(models, now, [old, old, old, now], trainer.config)))
    return outcomes


UNTIL = 17


@pytest.mark.slow
def test_without_the_guard_the_policy_ends_as_one_that_says_one_thing(tmp_path: Path) -> None:
    fallen = steps(prepare(tmp_path, collapsing(0.0)), UNTIL)
    assert fallen[-1].entropy < 0.2
    assert max(outcome.k1 for outcome in fallen) > 1.5


def test_a_collapse_is_seen_taken_back_and_over(tmp_path: Path) -> None:
    watched = prepare(tmp_path / "b", collapsing(0.9))
    held = steps(watched, UNTIL)
    [taken] = [o for o in held if o.failed == "collapse"]
    assert "k1 " in taken.detail and f"back to version {taken.restored}" in taken.detail
    good, at = taken.restored, taken.version
    assert taken.state_hash == held[good - 1].state_hash, "the bytes of the good version under the next number"
    assert good <= at - 1 - LAG
    refused = [o.version for o in held if o.failed == "discarded_version"]
    assert refused == [at + 1, at + 2], "batches that hold tokens of what was taken back"
    assert [held[version - 1].state_hash for version in refused] == [taken.state_hash] * LAG
    assert held[at + LAG].learning_rate == pytest.approx(held[good].learning_rate * 0.1)
    assert held[-1].entropy > 4.0
    assert all(o.max_abs_dlp == 0.0 for o in held if not o.failed), "Law 5 across a rollback"


@pytest.mark.slow
def test_a_checkpoint_knows_what_the_guard_knows(tmp_path: Path) -> None:
    """The trainer is killed before the alarm, in the middle of it and after it."""
    held = steps(prepare(tmp_path / "b", collapsing(0.9)), UNTIL)
    [at] = [o.version for o in held if o.failed == "collapse"]
    first = prepare(tmp_path / "c", collapsing(0.9))
    again = steps(first, at - 2)
    for stop in (at, at + 1):
        first.save({})
        again += steps(first, stop)
        first.save({})
        first = prepare(tmp_path / "c", collapsing(0.9))
    again += steps(first, UNTIL)
    assert [o.state_hash for o in again] == [o.state_hash for o in held]
