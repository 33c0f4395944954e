"""False alarms: how many known solutions of the bundled suites match a cheating rule that does not know them."""

import msgspec
import pytest

from headrace.judging import rules
from headrace.messages.tasks import Oracle, Task
from headrace.tasks import open_suite
from headrace.tasks.generated import repositories

EACH = 200


def alarms(task: Task, oracle: Oracle) -> tuple[str, ...]:
    """Rules that the solution matches as a diff, where nothing tells the rules that it is the solution."""
    blind = msgspec.structs.replace(oracle, solution={})
    return rules.suspicions(task, blind, oracle.solution, oracle.removed)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("train", "unseen") else pytest.mark.slow)
        for kind in sorted(repositories.SEEDS)
    ],
)
def test_no_solution_of_a_generated_suite_is_called_a_cheat(kind: str) -> None:
    suite = open_suite(f"generated/{kind}")
    ids = suite.ids()[:EACH]
    assert len(ids) >= 20
    raised = {id: suspicions for id in ids if (suspicions := alarms(suite.task(id), suite.oracle(id)))}
    assert not raised
