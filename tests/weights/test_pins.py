"""Which versions stay available: those of open evaluations and of the newest promotion, of this run alone."""

from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product.serving import Promotion
from headrace.messages.rollout import PolicyRef
from headrace.weights.pins import Pins


def asked(id: str, policy: PolicyRef) -> EvalRequest:
    return EvalRequest(run="r1", id=id, suite="s", policy=policy, tasks=1)


def test_an_evaluation_pins_until_its_result_and_a_promotion_until_the_next() -> None:
    pins = Pins("r1")
    for message in (
        asked("promotion", PolicyRef("pinned", 3)),
        asked("e2", PolicyRef("pinned", 4, run="r1")),
        Promotion(run="r1", version=5, reason="an operator"),
        asked("e3", PolicyRef("latest")),
    ):
        pins.take(message)
    assert pins.versions == [3, 4, 5], "an evaluation may have any id"
    figures = {"tasks": 1, "passed": 1, "rate": 1.0, "infra_failures": 0}
    pins.take(EvalResult(run="r1", id="e2", suite="s", policy=PolicyRef("pinned", 4), version=4, **figures))  # type: ignore[arg-type]
    pins.take(Promotion(run="r1", version=6, reason="an operator"))
    assert pins.versions == [3, 6]


def test_versions_of_a_branch_pin_nothing_and_replace_no_promotion() -> None:
    pins = Pins("r1")
    pins.take(Promotion(run="r1", version=5, reason="an operator"))
    pins.take(Promotion(run="r1", version=2, branch="users", reason="the gate"))
    pins.take(asked("e", PolicyRef("pinned", 7, run="r1-users")))
    assert pins.versions == [5]
