"""The figures of a step or an evaluation by name, as every exporter writes them."""

import math

import msgspec

from headrace.ledger.training import DURING
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalResult
from headrace.messages.training import StepDone, StepFailed

_OF_STEPS = (
    *("reward_mean", "pass_rate", "loss", "grad_norm", "learning_rate", "entropy", "clipped", "k1", "k3"),
    "dual_clipped",
    *("max_abs_dlp", "staleness_max", "staleness_bound", "tokens", "trained_slots", "seconds", "waited_s", "version"),
)


def figures(message: Message, steps: int) -> tuple[int, dict[str, float]] | None:
    """(step, name to finite value) of a record; None for one without figures. steps: steps done so far.

    Evaluations while training goes on form a curve over versions, so their step is the version.
    """
    if isinstance(message, StepDone):
        values = {f"train/{name}": float(getattr(message, name)) for name in _OF_STEPS}
        values |= {f"loss/{name}": value for name, value in message.metrics.items()}
        if message.turn_reward_mean is not None:
            values["train/turn_reward_mean"] = message.turn_reward_mean
        if message.behaviour is not None:
            values |= {f"behaviour/{name}": value for name, value in msgspec.structs.asdict(message.behaviour).items()}
        if message.efficiency is not None:
            values |= {f"efficiency/{name}": value for name, value in message.efficiency.figures().items()}
        return message.step, {name: value for name, value in values.items() if math.isfinite(value)}
    if isinstance(message, StepFailed) and message.efficiency is not None:
        return message.step, {f"efficiency/{name}": value for name, value in message.efficiency.figures().items()}
    if isinstance(message, EvalResult):
        name = message.reason or message.id
        if name.startswith(f"{DURING}_"):
            name, steps = message.suite, message.version
        return steps, {f"eval/{name}/rate": message.rate, f"eval/{name}/infra_failures": float(message.infra_failures)}
    return None
