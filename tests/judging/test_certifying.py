"""The runs of a certificate that ought to fail: the tests that notice the bug run first, and decide where one fails."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.judging import HostMachines, certifying
from headrace.judging.machines import Named
from headrace.messages.sandbox import Acquire, Op, OpResult, RunTests
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.tasks.suites import write_suite
from headrace.vmhost.node.host import Host
from tests.support.playing import report

pytestmark = pytest.mark.anyio

RIGHT = b"def larger(a, b):\n    return a if a > b else b\n\n\ndef one():\n    return 1\n"
TESTS = (
    b"from code_ import larger, one\n\n\ndef test_larger():\n    assert larger(1, 2) == larger(2, 1) == 2\n"
    b"\n\ndef test_one():\n    assert one() == 1\n\n\ndef test_type():\n    assert type(one()) is int\n"
)
NAMES = ("test_code.py::test_larger", "test_code.py::test_one", "test_code.py::test_type")


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=2))
    yield opened
    await opened.close()


class Recording(HostMachines):
    """The host, and the plans of the test runs."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.plans: list[tuple[str, ...]] = []

    async def acquire(self, request: Acquire) -> Named:
        """A fresh sandbox whose calls are recorded."""
        sandbox = await super().acquire(request)
        ordinary, plans = sandbox.call, self.plans

        async def call(op: Op, call_id: str = "") -> OpResult:
            if isinstance(op, RunTests):
                plans.append(op.plan.paths)
            return await ordinary(op, call_id)

        sandbox.call = call  # type: ignore[method-assign]
        return sandbox


async def test_tests_that_notice_the_bug_run_first(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certifying, "GOLD_RUNS", 1)
    monkeypatch.setattr(certifying, "MUTANTS", 2)
    ref, plan = TaskRef("s", "1"), TestPlan(kind="pytest", paths=("test_code.py",), timeout_s=60.0)
    task = Task(
        ref=ref,
        family="f",
        prompt="Find the bug.",
        files={"code_.py": RIGHT.replace(b"a > b", b"a < b")},
        allowed=("code_.py",),
        tests=plan,
    )
    oracle = Oracle(ref=ref, hidden={"test_code.py": TESTS}, tests=plan, expected=NAMES, solution={"code_.py": RIGHT})
    suite = write_suite("s", tmp_path / "s", [(task, oracle)], "made by a test")
    machines = Recording(host)
    made = await certifying.certify(suite, "1", machines, report)
    assert (made.gold_passed, made.noop, made.stub, made.mutants) == (1, "failed", "failed", 2)
    whole, few = plan.paths, NAMES[:1]
    # The known solution, no change, the known solution with the few, empty functions; then the two broken solutions, of
    # which `a >= b` is no bug: it passes the few, and all tests run.
    assert machines.plans[:4] == [whole, whole, few, few]
    assert sorted(machines.plans[4:]) == sorted([few, few, whole])
    assert made.survivors == ("code_.py:2: > -> >=",)
