"""Another objective on the same records: what it changes is what the numbers say."""

import json
import math

import pytest

from headrace.bus.broker.server import Server
from tests.replay.conftest import Finished, Run


def test_another_learning_rate_moves_further_along_the_same_gradient(
    finished: Finished, opened: Server, headrace: Run
) -> None:
    """Adam's first step is the learning rate times the gradient's sign: a tenth of the rate is a tenth of the way."""
    code, out, err = headrace("replay", str(finished.folder), "--step", "0", "--with", "algorithm.learning_rate=1e-3")
    assert (code, err) == (0, "")
    report = json.loads(out[0])
    assert report["changed"] == {"learning_rate": 1e-3}
    assert report["bitwise_equal"]
    assert report["weights_hash"] == finished.outcomes[0].state_hash != report["weights_hash_with"]
    assert report["loss"] == report["loss_with"]
    assert report["grad_norm"] == report["grad_norm_with"] > 0
    assert math.isclose(report["update_norm_with"], report["update_norm"] / 10, rel_tol=1e-3)
    assert math.isclose(report["weight_delta_norm"], 0.9 * report["update_norm"], rel_tol=1e-3)
    assert 0 < report["changed_share"] < 1


def test_a_bound_refuses_what_was_taken_and_frees_what_was_refused(
    finished: Finished, opened: Server, headrace: Run
) -> None:
    run = str(finished.folder)
    code, out, _ = headrace("replay", run, "--step", "1", "--with", "algorithm.max_grad_norm=1e-9")
    refused = json.loads(out[0])
    assert (code, refused["failed"], refused["failed_with"]) == (0, "", "gradient_spike")
    assert refused["update_norm_with"] == 0.0
    code, out, _ = headrace("replay", run, "--step", "5", "--with", "algorithm.max_grad_norm=0.0")
    freed = json.loads(out[0])
    assert (code, freed["failed"], freed["failed_with"]) == (0, "gradient_spike", "")
    assert freed["update_norm"] == 0.0 < freed["update_norm_with"]


def test_the_reference_of_a_new_penalty_is_version_0(finished: Finished, opened: Server, headrace: Run) -> None:
    """At version 0 the policy is its own reference and the penalty is nothing; later it is something."""
    run, penalty = str(finished.folder), ("--with", "algorithm.kl_weight=0.5")
    first, later = (json.loads(headrace("replay", run, "--step", step, *penalty)[1][0]) for step in ("0", "1"))
    assert math.isclose(first["loss"], first["loss_with"], abs_tol=1e-6)
    assert abs(later["loss_with"] - later["loss"]) > 1e-3


@pytest.mark.parametrize(
    ("entry", "code", "says"),
    [
        ("run.seed=2", 1, "run.seed does not change a step"),
        ("algorithm.learning_rate=1e-2", 1, "does not change the recipe of the step"),
        ("algorithm.learning_rat=1", 2, "unknown key"),
        ("algorithm.learning_rate=fast", 2, "learning_rate"),
        ("learning_rate", 2, "section.key=value"),
    ],
)
def test_what_is_no_other_objective_is_said(
    finished: Finished, opened: Server, headrace: Run, entry: str, code: int, says: str
) -> None:
    exit_code, out, err = headrace("replay", str(finished.folder), "--step", "1", "--with", entry)
    assert (exit_code, out) == (code, [])
    assert says in err
