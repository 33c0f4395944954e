"""The outcome of one step: the figures that StepDone publishes, or the reason for which no update was made."""

from headrace.messages.training import StepFigures
from headrace.training.state import TrainerState


class StepOutcome(StepFigures, frozen=True, kw_only=True):
    """`failed` is empty for an update that was made; otherwise `version` has the old bytes, or restored ones.

    k1, k3, entropy and clipped are over the tokens that were computed, those of groups with an advantage.
    """

    failed: str = ""
    """The reason, in snake_case."""
    detail: str = ""
    restored: int = -1
    """The earlier version whose bytes and optimizer these are, after a rollback; -1 when there was none."""
    computed_tokens: int = 0


def refuse(state: TrainerState, reason: str, detail: str) -> StepOutcome:
    """The outcome of a batch that is not trained on: the next version, with the old bytes."""
    state.zero_grad()
    state.version += 1
    return StepOutcome(version=state.version, state_hash=state.hash(), failed=reason, detail=detail)
