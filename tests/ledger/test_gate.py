"""The gate's stages as pure functions: what passes, what is held back, what is rolled back."""

import msgspec

from headrace.config import Gate
from headrace.ledger import gate
from headrace.messages.product import GateState
from headrace.messages.rollout import PolicyRef

OLD, NEW = PolicyRef("pinned", 0), PolicyRef("pinned", 1, run="b")
RULES = Gate(tasks=40, shadow=4, canary=(0.05, 0.25), sessions=10)


def benchmark(won: int, lost: int, rules: Gate = RULES) -> gate.Move:
    state = gate.begin("r", NEW, OLD, rules, 0.0, 5).state
    assert state.stage == "benchmark"
    new = {str(task): task < won for task in range(rules.tasks)}
    old = {str(task): won <= task < won + lost for task in range(rules.tasks)}
    move = gate.measured(state, new, old, rules, 1.0)
    assert move is not None
    return move


def rate(state: GateState, ups: str, policy: PolicyRef = NEW, rules: Gate = RULES) -> GateState:
    """Ratings of one policy in order; + is up."""
    for up in ups:
        after = gate.rated(state, policy, up == "+", state.seen_seq + 1, rules, 2.0)
        state = after.state if isinstance(after, gate.Move) else after
    return state


def canary(rules: Gate = RULES) -> GateState:
    state = benchmark(12, 0, rules).state
    while state.stage == "shadow":
        after = gate.shadowed(state, True, rules, 1.0)
        state = after.state if isinstance(after, gate.Move) else after
    return state


def test_a_better_version_passes_every_stage() -> None:
    state = canary()
    assert (state.stage, state.share) == ("canary", 0.05)
    state = rate(rate(state, "++-" * 10, OLD), "+" * 10)
    assert (state.stage, state.share, state.treated.sessions) == ("canary", 0.25, 0), "each stage counts anew"
    assert rate(state, "+" * 10).stage == "promoted"


def test_a_version_that_shows_nothing_is_held() -> None:
    for won, lost in ((0, 0), (3, 3), (2, 8)):
        move = benchmark(won, lost)
        assert move.state.stage == "held" and "not above the margin" in move.verdict.reason
    failing = benchmark(12, 0).state
    for _ in range(4):
        after = gate.shadowed(failing, False, RULES, 1.0)
        failing = after.state if isinstance(after, gate.Move) else after
    assert failing.stage == "held"
    late = gate.overdue(canary(), 1e6)
    assert late is not None and late.state.stage == "held"


def test_no_common_task_is_no_measurement() -> None:
    state = gate.begin("r", NEW, OLD, RULES, 0.0, 0).state
    move = gate.measured(state, {"1": True}, {"2": True}, RULES, 1.0)
    assert move is not None and (move.state.stage, move.verdict.benchmark.tasks) == ("held", 0)


def test_a_version_that_users_rate_worse_is_rolled_back() -> None:
    rules = msgspec.structs.replace(RULES, sessions=100)
    state = rate(canary(rules), "+" * 60, OLD, rules)
    state = rate(state, "-" * 40, NEW, rules)
    assert (state.stage, state.share) == ("rolled_back", 0.0)


def test_a_rating_counts_once_and_only_of_the_two_versions() -> None:
    state = canary()
    counted = rate(state, "+")
    assert gate.rated(counted, NEW, True, counted.seen_seq, RULES, 2.0) == counted
    other = gate.rated(counted, PolicyRef("pinned", 9), False, counted.seen_seq + 1, RULES, 2.0)
    assert isinstance(other, GateState) and (other.treated, other.control) == (counted.treated, counted.control)


def test_the_evidence_of_all_stages_counts_together() -> None:
    rules = msgspec.structs.replace(RULES, sessions=20)
    mild = rate(rate(canary(rules), "++-" * 100, OLD, rules), "++-" * 6 + "+-", NEW, rules)
    assert (mild.stage, mild.share) == ("canary", 0.25)
    alone = msgspec.structs.replace(mild, evidence=0.0)
    assert gate.harm(msgspec.structs.replace(mild, evidence=3.0)) < gate.harm(alone) == 1.0


def test_a_session_from_before_the_stage_is_no_evidence() -> None:
    state = canary()
    before = gate.rated(state, OLD, True, state.seen_seq + 1, RULES, 2.0, began=state.since - 0.1)
    assert isinstance(before, GateState)
    assert (before.control.sessions, before.seen_seq) == (0, state.seen_seq + 1)
    within = gate.rated(state, OLD, True, state.seen_seq + 1, RULES, 2.0, began=state.since)
    assert isinstance(within, GateState) and within.control.sessions == 1


def test_without_benchmark_shadow_or_stages_the_next_one_begins() -> None:
    assert gate.begin("r", NEW, OLD, Gate(tasks=0, shadow=3), 0.0, 0).state.stage == "shadow"
    assert gate.begin("r", NEW, OLD, Gate(tasks=0), 0.0, 0).state.stage == "canary"
    assert gate.begin("r", NEW, OLD, Gate(tasks=0, canary=()), 0.0, 0).state.stage == "promoted"
