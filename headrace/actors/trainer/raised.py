"""A step that raised in a group of processes: the group has ended, and its successor does not take the step again.

One process keeps its weights when a step raises, so it records the failure and goes on. In a group the other processes
wait in an exchange of that step, so the group ends. The failure is recorded before that: the version has the bytes of
the one before it, whose hash the manifest names. The trainer's next life finds the record and gives the step up.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headrace.actors.trainer import records
from headrace.bus.runtime.actor import Actor
from headrace.messages.training import StepDone, StepFailed, StepManifest
from headrace.training.figures.clock import Cause
from headrace.training.outcome import StepOutcome
from headrace.training.parallel.interface import StepRaised

REASON = "exception"
"""`StepFailed.reason` of a step that raised."""


class Recorder(NamedTuple):
    """Writes the failure of a step."""

    actor: Actor
    write: Callable[[StepFailed | StepDone], Awaitable[int]]
    announced: Callable[[], Awaitable[tuple[int, StepManifest]]]
    """The sequence and the manifest of the step, when it is on the bus."""
    lap: Callable[[], tuple[float, dict[Cause, float]]]
    """The step's time, `Clock.lap`."""
    recorded: bool = False
    """Whether the step has an outcome already: a step that was done before and raises now is no failed step."""

    async def watched(self, step: Awaitable[StepOutcome]) -> StepOutcome:
        """The outcome of a step. StepRaised when it ended its group; its StepFailed is then on the bus."""
        try:
            return await step
        except StepRaised as error:
            if self.recorded:
                raise
            seq, manifest = await self.announced()
            failed = StepOutcome(
                version=manifest.version + 1, state_hash=manifest.base_hash, failed=REASON, detail=error.raised
            )
            record = records.outcome(self.actor.config, manifest, seq, failed, self.lap())
            assert isinstance(record, StepFailed)
            await self.write(record)
            await self.actor.event("step_failed", sentence(record), "error", step=manifest.step)
            raise


def sentence(record: StepFailed) -> str:
    """The text of the event `step_failed`."""
    return f"step {record.step}: {record.reason}: {record.detail}"


def given_up(recorded: StepDone | StepFailed | None) -> str:
    """The exception of a recorded step; empty for every other outcome."""
    return recorded.detail if isinstance(recorded, StepFailed) and recorded.reason == REASON else ""
