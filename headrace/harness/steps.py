"""The steps of a task: one agent and one sandbox, with a prompt for each step.

A step ends with the turn that calls finish. The changes so far are read then, the next step's files are written, and
its prompt follows as the user's next message. Limits hold for all steps together.
"""

from collections.abc import Sequence

from headrace.messages.rollout import ToolCall, Turn
from headrace.messages.tasks import Task


def step_ended(turns: Sequence[Turn], call: ToolCall, task: Task) -> int:
    """Number of steps that have ended with this call, the last of its turn; 0 when it ends none, or the task."""
    ended = 0
    for turn in turns:
        ended += turn.finishes
        if call in turn.calls:
            ends = turn.finishes and call is turn.calls[-1] and ended <= len(task.later)
            return ended if ends else 0
    return 0
