"""Steps that raise, and the end of a run in which every step raises or no batch can be trained on.

One process keeps its weights when a step raises, so it records the failure and goes on. In a group the other processes
wait in an exchange of that step, so the group ends. The failure is recorded before that: the version has the bytes of
the one before it, whose hash the manifest names. The trainer's next life finds the record and gives the step up.

A step that raises costs its batch. When one exception ends several steps in a row, it is not a batch's fault: the next
step would raise it too, and the run would end after all its steps without a policy. The same holds for batches of which
every attempt is left out.
"""

import re

from headrace.bus.errors import Unrecoverable
from headrace.bus.runtime.supervisor import ALIKE
from headrace.messages.training import StepDone, StepFailed, StepManifest

REASON = "exception"
"""`StepFailed.reason` of a step that raised."""
NOTHING_LEFT = "bad_batch"
"""The same of a batch of which no attempt can be trained on."""
Outcome = StepDone | StepFailed
_RANK = re.compile(r"^rank \d+: ")
"""The rank that raised first, which may be another one in each step."""


class Row:
    """The latest steps in a row that one exception ended, or whose batches held nothing to train on. `ALIKE` of them
    end the run, as for other failures."""

    def __init__(self) -> None:
        self._cause, self._count = "", 0

    def seen(self, outcome: Outcome) -> None:
        """Count an outcome that is on the bus."""
        cause = ""
        if isinstance(outcome, StepFailed) and outcome.reason in (REASON, NOTHING_LEFT):
            cause = _RANK.sub("", outcome.detail) if outcome.reason == REASON else NOTHING_LEFT
        self._count = self._count + 1 if cause and cause == self._cause else int(bool(cause))
        self._cause = cause

    def check(self, record: StepManifest | Outcome) -> None:
        """Count a new record. Unrecoverable when its step was one too many."""
        if isinstance(record, StepManifest):
            return
        self.seen(record)
        if self._count < ALIKE:
            return
        if self._cause == NOTHING_LEFT:
            assert isinstance(record, StepFailed)
            raise Unrecoverable(
                f"{self._count} batches in a row could not be trained on, the last one in step {record.step}: "
                f"{record.detail}; correct what samples (`headrace replay --step {record.step}` shows the batch), then "
                "resume the run; it continues with the next batch"
            )
        raise Unrecoverable(
            f"{self._count} steps in a row raised {self._cause}, the last one is step {record.step}: correct the "
            "recipe or its plugins (the trainer's log has the traceback), then resume the run; it continues with "
            "the next batch"
        )


def sentence(record: StepFailed) -> str:
    """The text of the event `step_failed`."""
    return f"step {record.step}: {record.reason}: {record.detail}"


def given_up(recorded: Outcome | None) -> str:
    """The exception of a recorded step; empty for every other outcome."""
    return recorded.detail if isinstance(recorded, StepFailed) and recorded.reason == REASON else ""
