"""run_tests: the tests that the task shows to the agent."""

import msgspec

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import OpResult, RunTests, TestOutcome
from headrace.rendering.schemas import BY_NAME

_SHOWN = 10
"""Most tests that are named among those that did not pass."""


def report(result: OpResult, details: bool) -> Answer:
    """``failed NAME`` for each test that did not pass, then how many did. `details` adds the messages."""
    names = {test.name.partition("::")[0] for test in result.tests}
    bad = [test for test in result.tests if test.outcome not in ("passed", "skipped")]

    def line(test: TestOutcome) -> str:
        name = test.name.partition("::")[2] if len(names) == 1 else test.name
        message = f": {test.message.strip()[:400]}" if details and test.message.strip() else ""
        return f"{test.outcome} {name or test.name}{message}"

    lines = [line(test) for test in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"and {len(bad) - _SHOWN} more")
    passed = sum(test.outcome == "passed" for test in result.tests)
    if passed or not bad:
        lines.append(f"{passed} passed")
    if result.timed_out:
        lines.append("time limit")
    return Answer("\n".join(lines), ok=True)


class RunTestsTool:
    """The tests that the task shows to the agent."""

    schema, writes = BY_NAME["run_tests"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """A report; failing tests are an answer, not a failed call."""
        plan = workspace.task.tests
        if "path" in arguments:
            if plan.kind == "command":
                return Answer("this repository's tests run as a whole; leave path out", ok=False)
            plan = msgspec.structs.replace(plan, paths=(arguments["path"],))
        result = await workspace.call(RunTests(plan=plan))
        if not result.tests and not result.ok:
            return failed(result)
        return report(result, workspace.details)


TOOL = RunTestsTool()
