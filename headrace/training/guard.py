"""What a step must not do to the weights: reasons to refuse one update, and the watch that takes several back.

Refusal: a refused step costs one batch, a poisoned one the run. The check comes before the update, so the old bytes are
still there.

The guard: with stale samples at a high learning rate the tiny policy collapsed within ten steps, and k1, how far the
trainer has moved from whoever wrote its tokens, rose first. So k1 above its limit is the alarm: at once when reward or
entropy agree, else when it stays there for `guard_patience` steps. Then weights and optimizer go back to the last good
version, which becomes the next one: numbers are never reused. The StepFailed of that step says so (`restored`). Tokens
of the versions that were taken back would pull the policy there again, so batches that hold any are refused (at most
`staleness` of them), and the learning rate is multiplied by `guard_backoff`, or the same would happen again.

Good is what was looked at: a copy is taken now and then and becomes the good one after bound + 1 further batches
without an alarm. So a rollback goes back by bound + 1 to about twice that. Everything that the guard knows is in the
checkpoint and follows from recorded steps alone: a restarted trainer and a replay decide the same.

`numerics.on_mismatch = "roll_back"` uses the same copies: there a batch is calm while every engine keeps within the
limits, and one that does not takes back what was learned since, at an unchanged learning rate.

Trade-off: two copies of masters and moments in memory and in every checkpoint, which is why it is off by default.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headrace.config import Algorithm
from headrace.training.state import TrainerState

WINDOW = 8
"""Calm steps that reward and entropy are compared with."""


def refusal(
    loss: float, gradient_norm: float, k1: float, *, max_gradient_norm: float = 0.0, max_k1: float = 0.0
) -> str:
    """Why an update may not be made, in snake_case; empty when it may. A limit of 0 is no limit."""
    if not math.isfinite(loss):
        return "loss_not_finite"
    if not math.isfinite(gradient_norm):
        return "gradient_not_finite"
    if not math.isfinite(k1):
        return "mismatch_not_finite"
    if max_gradient_norm and gradient_norm > max_gradient_norm:
        return "gradient_spike"
    if max_k1 and abs(k1) > max_k1:
        return "mismatch_too_large"
    return ""


class Reading(NamedTuple):
    """What one batch said before its update: nats a token, mean reward, nats a token."""

    k1: float
    reward: float
    entropy: float


def alarm(now: Reading, calm: Iterable[Reading], over: int, algorithm: Algorithm) -> str:
    """Why a reading means that the policy collapses; empty when it does not. over: steps before it above the limit."""
    if now.k1 <= algorithm.guard_k1:
        return ""
    said = f"k1 {now.k1:.3g} is above {algorithm.guard_k1:g}"
    known = list(calm)
    if known:
        reward = statistics.fmean(reading.reward for reading in known)
        if now.reward < algorithm.guard_reward * reward:
            return f"{said} and the reward fell from {reward:.3g} to {now.reward:.3g}"
        entropy = statistics.fmean(reading.entropy for reading in known)
        if not entropy / algorithm.guard_entropy <= now.entropy <= entropy * algorithm.guard_entropy:
            return f"{said} and the entropy went from {entropy:.3g} to {now.entropy:.3g}"
    return f"{said} for {over + 1} steps" if over + 1 >= algorithm.guard_patience else ""


@dataclass(frozen=True)
class Copy:
    """Masters and moments as they were at a version; `step` counts the optimizer's updates."""

    version: int
    step: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, state: TrainerState) -> "Copy":
        """The state as it is now."""
        return cls(state.version, state.step, {name: value.clone() for name, value in state.tensors().items()})

    def restore(self, state: TrainerState) -> None:
        """Weights and optimizer as they were; the version number stays where it is."""
        state.restore(self.tensors, version=state.version, step=self.step)


class Guard:
    """One run's watch. Does nothing while `algorithm.guard_k1` is 0 and `numerics.on_mismatch` is not roll_back."""

    def __init__(self) -> None:
        self.calm: list[Reading] = []
        self.over = 0
        """Batches in a row above the limit."""
        self.factor = 1.0
        """What rollbacks have made of the learning rate."""
        self.good: Copy | None = None
        self.candidate: Copy | None = None
        self.discarded: list[tuple[int, int]] = []
        """Versions that were taken back, first and last."""

    def refuses(self, versions: Iterable[int]) -> str:
        """Why a batch may not be trained on: a version wrote in it that was taken back."""
        for version in sorted(set(versions)):
            if any(first <= version <= last for first, last in self.discarded):
                return f"version {version} wrote a token and was taken back"
        return ""

    def look(self, state: TrainerState, now: Reading, algorithm: Algorithm, bound: int) -> str:
        """Judge the state that is about to be updated. Why it must go back, or empty."""
        why = alarm(now, self.calm, self.over, algorithm)
        if why:
            return why
        if now.k1 > algorithm.guard_k1:
            self.over += 1
            return ""
        self.over = 0
        self.calm = [*self.calm, now][-WINDOW:]
        self.keep(state, bound)
        return ""

    def keep(self, state: TrainerState, bound: int) -> None:
        """A batch spoke for the state that is about to be updated: hold it, or let what is held become the good one."""
        if self.candidate is None:
            self.candidate = Copy.of(state)
        elif state.version - self.candidate.version > bound:
            self.good, self.candidate = self.candidate, Copy.of(state)

    def roll_back(self, state: TrainerState, algorithm: Algorithm, *, slower: bool = True) -> int:
        """Put the last good version's bytes and optimizer in place; its number, -1 when there is none yet.

        slower: the updates themselves went wrong, so the learning rate falls.
        """
        self.over, self.calm, self.candidate = 0, [], None
        if slower:
            self.factor *= algorithm.guard_backoff
        if self.good is None:
            return -1
        found = self.good.version
        self.good.restore(state)
        self.discarded.append((found + 1, state.version))
        # The next version has these bytes: another rollback need not discard what it writes.
        self.good = Copy(state.version + 1, self.good.step, self.good.tensors)
        return found

    def dump(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For the checkpoint: what JSON can hold, and tensors by flat name."""
        about: dict[str, Any] = {
            "calm": [list(reading) for reading in self.calm],
            "over": self.over,
            "factor": self.factor,
            "discarded": [list(pair) for pair in self.discarded],
        }
        tensors: dict[str, Tensor] = {}
        for name, copy in (("good", self.good), ("candidate", self.candidate)):
            if copy is not None:
                about[name] = [copy.version, copy.step]
                tensors.update({f"{name}.{key}": value for key, value in copy.tensors.items()})
        return about, tensors

    @classmethod
    def load(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Guard":
        """What `dump` gave. ValueError when it is not that."""
        found = cls()
        try:
            found.calm = [Reading(*map(float, reading)) for reading in about["calm"]]
            found.over, found.factor = int(about["over"]), float(about["factor"])
            found.discarded = [(int(first), int(last)) for first, last in about["discarded"]]
            for name in ("good", "candidate"):
                if name in about:
                    head = f"{name}."
                    own = {key[len(head) :]: value.clone() for key, value in tensors.items() if key.startswith(head)}
                    setattr(found, name, Copy(int(about[name][0]), int(about[name][1]), own))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a guard's memory: {error}") from None
        return found
