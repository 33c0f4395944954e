"""The bounded reading of a test run: the report of a candidate's process becomes outcomes, or is refused.

Candidate code runs in the process that reports the tests, so a report may hold anything that fits a frame: a million
tests, names of megabytes, observations beyond what an honest process can send. The judge works with reports inside the
bounds below and refuses the others as the candidate's own output: reward 0, with the reason in the Score. A refusal is
never an infrastructure failure, because a policy could otherwise remove its failed attempts from the baseline.
"""

from headrace.errors import HeadraceError
from headrace.messages.sandbox import OpResult, TestOutcome
from headrace.vmhost.guest.testing.observing import LIMIT

TESTS = 50_000
"""Tests of one run."""
NAME = 4_000
"""Characters of a test's name."""
MESSAGE = 2_000
"""Characters of a failure's message that are kept; an honest one may be longer, so the rest is cut."""


class RefusedOutput(HeadraceError, ValueError):
    """The report of a candidate's process is outside the bounds; the text says which bound."""


def read(result: OpResult) -> tuple[TestOutcome, ...]:
    """The reported tests of a run, with messages cut to `MESSAGE`. RefusedOutput outside the bounds."""
    tests = result.tests
    if len(tests) > TESTS:
        raise RefusedOutput(f"{len(tests)} tests are reported; a run has at most {TESTS}")
    observed = sum(len(text) for test in tests for text in test.observed)
    if observed > LIMIT:
        raise RefusedOutput(f"{observed} characters of observations are reported; an honest run sends at most {LIMIT}")
    for test in tests:
        if len(test.name) > NAME:
            raise RefusedOutput(f"a test's name has {len(test.name)} characters; at most {NAME} are read")
    return tuple(
        TestOutcome(test.name, test.outcome, test.message[:MESSAGE], test.observed)
        if len(test.message) > MESSAGE
        else test
        for test in tests
    )
