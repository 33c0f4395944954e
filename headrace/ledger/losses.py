"""Groups in a row that the infrastructure lost: a run whose sandboxes all fail would issue groups without end.

Only what one curriculum process decides is counted: a run that was started again after a repair begins at zero.
"""

from collections import Counter

from headrace.ledger.state import RunState
from headrace.messages.ledger import GroupClosed, GroupDropped

LIMIT = 64
"""Groups in a row after which `Losses.count` gives a reason to end."""


class Losses:
    """Counts the groups that were dropped for infrastructure since the last one that was closed."""

    def __init__(self) -> None:
        self._lost = 0

    def count(self, end: GroupClosed | GroupDropped, state: RunState) -> str:
        """Count the end of a group. Returns the reason why the run has to end; empty below the limit."""
        if isinstance(end, GroupClosed):
            self._lost = 0
            return ""
        self._lost += end.reason == "infra"
        if self._lost < LIMIT:
            return ""
        attempts = [attempt for slot in state.groups[end.group].slots.values() for attempt in slot.attempts]
        reasons = Counter(attempt.failed for attempt in attempts if attempt.failed)
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        return (
            f"{self._lost} groups in a row had fewer than two scored attempts; attempts of "
            f"{end.group} failed by: {listed}; `headrace logs {state.run} --actor environment` and `--actor rollout` "
            f"have the causes: remove them and start the run again"
        )
