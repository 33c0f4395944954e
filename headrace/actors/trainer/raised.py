"""Steps that raise: the record of one in a group of processes, and the end of a run in which every step raises.

One process keeps its weights when a step raises, so it records the failure and goes on. In a group the other processes
wait in an exchange of that step, so the group ends. The failure is recorded before that: the version has the bytes of
the one before it, whose hash the manifest names. The trainer's next life finds the record and gives the step up.

A step that raises costs its batch. When one exception ends several steps in a row, it is not a batch's fault: the next
step would raise it too, and the run would end after all its steps without a policy.
"""

import re

from headrace.bus.errors import Unrecoverable
from headrace.bus.runtime.supervisor import ALIKE
from headrace.messages.training import StepDone, StepFailed, StepManifest

REASON = "exception"
"""`StepFailed.reason` of a step that raised."""
Outcome = StepDone | StepFailed
_RANK = re.compile(r"^rank \d+: ")
"""The rank that raised first, which may be another one in each step."""


class Row:
    """The latest steps in a row that one exception ended. `ALIKE` of them end the run, as for other failures."""

    def __init__(self) -> None:
        self._raised, self._count = "", 0

    def seen(self, outcome: Outcome) -> Outcome:
        """Count an outcome that is on the bus."""
        raised = _RANK.sub("", given_up(outcome))
        self._count = self._count + 1 if raised and raised == self._raised else int(bool(raised))
        self._raised = raised
        return outcome

    def check(self, record: StepManifest | Outcome) -> None:
        """Count a new record. Unrecoverable when its step was one too many."""
        if isinstance(record, StepManifest):
            return
        self.seen(record)
        if self._count >= ALIKE:
            raise Unrecoverable(
                f"{self._count} steps in a row raised {self._raised}, the last one is step {record.step}: correct the "
                "recipe or its plugins (the trainer's log has the traceback), then resume the run; it continues with "
                "the next batch"
            )


def sentence(record: StepFailed) -> str:
    """The text of the event `step_failed`."""
    return f"step {record.step}: {record.reason}: {record.detail}"


def given_up(recorded: Outcome | None) -> str:
    """The exception of a recorded step; empty for every other outcome."""
    return recorded.detail if isinstance(recorded, StepFailed) and recorded.reason == REASON else ""
