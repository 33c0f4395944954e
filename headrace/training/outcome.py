"""The outcome of one step: the figures that StepDone publishes, or the reason for which no update was made."""

from headrace.messages.training import StepFigures, TokenGap
from headrace.training.figures.work import Work
from headrace.training.state import TrainerState


class StepOutcome(StepFigures, frozen=True, kw_only=True):
    """`failed` is empty after an update. Otherwise `version` has the bytes of the version before it, or restored ones.

    k1, k3, entropy and both shares of clipped tokens are means over `computed_tokens`: the tokens of groups with an
    advantage.
    """

    failed: str = ""
    """The reason, in snake_case."""
    detail: str = ""
    restored: int = -1
    """After a rollback, the earlier version whose bytes and optimizer were restored; -1 without a rollback."""
    computed_tokens: int = 0
    work: Work = Work()
    between_s: float = 0.0
    """Seconds from the last update to this step's first forward pass, without waiting for a batch."""
    peak_flops: float = 0.0
    """Of all devices together, per second; 0 where it is not known."""
    peak_bytes: int = 0
    """Largest peak of a process's memory in the step, see `figures.memory`; 0 where it was not measured."""
    planned_bytes: int = 0
    """Of the memory plan, for each process."""
    collectives_s: tuple[float, ...] = ()
    """Seconds in collectives, of each process; empty for a single one."""
    gaps: tuple[TokenGap, ...] = ()
    """Trainer minus sampler by token, of the re-scored trajectories."""


def refuse(state: TrainerState, reason: str, detail: str, *, hashed: bool = True) -> StepOutcome:
    """The outcome of a batch that is not trained on: the next version, with the old bytes. hashed: with their hash."""
    state.zero_grad()
    state.version += 1
    digest = state.hash() if hashed else ""
    return StepOutcome(version=state.version, state_hash=digest, failed=reason, detail=detail)
