"""Refusal of single updates, and the guard, which rolls several updates back.

Refusal: a refused step costs one batch, a corrupted policy costs the run. The check runs before the update, so nothing
has to be undone.

The guard: with stale samples at a high learning rate the tiny policy collapsed within ten steps, and k1, the distance
of the trainer from the samplers, rose first. So k1 above its limit raises the alarm: at once when reward or entropy
agree, else when it stays there for `guard_patience` steps. Weights and optimizer then go back to the last good version,
whose bytes become the next version: numbers are never reused. The StepFailed of that step names it (`restored`). Tokens
of the versions that were rolled back would move the policy there again, so batches that hold any are refused (at most
`staleness` of them), and the learning rate is multiplied by `guard_backoff`, because the same would happen again.

A version is good when later batches confirmed it: a copy is taken regularly and becomes the good one after bound + 1
further batches without an alarm. So a rollback goes back by bound + 1 to about twice as many versions. The checkpoint
holds the guard's state, which depends on recorded steps alone: a restarted trainer and a replay decide the same.

`numerics.on_mismatch = "roll_back"` uses the same copies: a batch then confirms a version while every engine keeps
within the limits, and a batch beyond them takes back the updates since, at an unchanged learning rate.

Trade-off: two copies of masters and moments in memory and in every checkpoint, so it is off by default.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headrace.config import Algorithm
from headrace.training.state import TrainerState

REWARD = 0.5
"""A reward below this share of its mean over calm steps confirms the collapse."""
ENTROPY = 2.0
"""An entropy that differs from its calm mean by this factor, up or down, confirms it."""
WINDOW = 8
"""Number of steps without an alarm whose mean reward and entropy a new step is compared with."""


def refusal(loss: float, gradient_norm: float, k1: float, max_gradient_norm: float = 0.0) -> str:
    """The reason for which an update is refused, in snake_case; empty when it is not. A limit of 0 is no limit."""
    if not math.isfinite(loss):
        return "loss_not_finite"
    if not math.isfinite(gradient_norm):
        return "gradient_not_finite"
    if not math.isfinite(k1):
        return "mismatch_not_finite"
    if max_gradient_norm and gradient_norm > max_gradient_norm:
        return "gradient_spike"
    return ""


class BatchMetrics(NamedTuple):
    """The figures of one batch before its update: k1 and entropy in nats per token, and the mean reward."""

    k1: float
    reward: float
    entropy: float


def alarm(now: BatchMetrics, calm: Iterable[BatchMetrics], over: int, algorithm: Algorithm) -> str:
    """The reason for an alarm; empty without one. calm: steps to compare with; over: steps in a row already above the
    limit."""
    if now.k1 <= algorithm.guard_k1:
        return ""
    said = f"k1 {now.k1:.3g} is above {algorithm.guard_k1:g}"
    earlier = list(calm)
    if earlier:
        reward = statistics.fmean(reading.reward for reading in earlier)
        if now.reward < REWARD * reward:
            return f"{said} and the reward fell from {reward:.3g} to {now.reward:.3g}"
        entropy = statistics.fmean(reading.entropy for reading in earlier)
        if not entropy / ENTROPY <= now.entropy <= entropy * ENTROPY:
            return f"{said} and the entropy went from {entropy:.3g} to {now.entropy:.3g}"
    return f"{said} for {over + 1} steps" if over + 1 >= algorithm.guard_patience else ""


@dataclass(frozen=True)
class StateSnapshot:
    """Masters and moments as they were at a version; `step` counts the optimizer's updates."""

    version: int
    step: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, state: TrainerState) -> "StateSnapshot":
        """A copy of the current state."""
        return cls(state.version, state.step, {name: value.clone() for name, value in state.tensors().items()})

    def restore(self, state: TrainerState) -> None:
        """Put weights and optimizer back; the state's version number does not change."""
        state.restore(self.tensors, version=state.version, step=self.step)


class Guard:
    """The guard of one run. Unused while `algorithm.guard_k1` is 0 and `numerics.on_mismatch` is not roll_back."""

    def __init__(self) -> None:
        self.calm: list[BatchMetrics] = []
        self.over = 0
        """Batches in a row above the limit."""
        self.factor = 1.0
        """The factor on the learning rate after all rollbacks."""
        self.good: StateSnapshot | None = None
        self.candidate: StateSnapshot | None = None
        self.discarded: list[tuple[int, int]] = []
        """(first, last) of each range of versions that were rolled back."""

    def refuses(self, versions: Iterable[int]) -> str:
        """The reason to refuse a batch whose tokens have these versions: one of them was rolled back. Empty
        otherwise."""
        for version in sorted(set(versions)):
            if any(first <= version <= last for first, last in self.discarded):
                return f"version {version} wrote a token and was taken back"
        return ""

    def look(self, state: TrainerState, now: BatchMetrics, algorithm: Algorithm, bound: int) -> str:
        """Check the state before its update. Returns the reason for a rollback, or an empty text."""
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
        """A batch confirms the state before its update: copy it, or make the held copy the good one."""
        if self.candidate is None:
            self.candidate = StateSnapshot.of(state)
        elif state.version - self.candidate.version > bound:
            self.good, self.candidate = self.candidate, StateSnapshot.of(state)

    def roll_back(self, state: TrainerState, algorithm: Algorithm, *, slower: bool = True) -> int:
        """Restore the last good version's bytes and optimizer. Returns its number, -1 when there is none yet.

        slower: also lower the learning rate, because the updates caused the collapse.
        """
        self.over, self.calm, self.candidate = 0, [], None
        if slower:
            self.factor *= algorithm.guard_backoff
        if self.good is None:
            return -1
        restored = self.good.version
        self.good.restore(state)
        self.discarded.append((restored + 1, state.version))
        # The next version has these bytes, so a further rollback need not discard its tokens.
        self.good = StateSnapshot(state.version + 1, self.good.step, self.good.tensors)
        return restored

    def taken_back(self, to: int, newest: int) -> None:
        """An order has restored a version: `newest` and those since are rolled back, and nothing confirms others."""
        self.over, self.calm, self.good, self.candidate = 0, [], None, None
        self.discarded.append((to + 1, newest))

    def dump(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The guard for a checkpoint: values that JSON can hold, and tensors by flat name."""
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
        """The guard that a `dump` describes. ValueError for other data."""
        guard = cls()
        try:
            guard.calm = [BatchMetrics(*map(float, reading)) for reading in about["calm"]]
            guard.over, guard.factor = int(about["over"]), float(about["factor"])
            guard.discarded = [(int(first), int(last)) for first, last in about["discarded"]]
            for name in ("good", "candidate"):
                if name in about:
                    head = f"{name}."
                    saved = {key[len(head) :]: value.clone() for key, value in tensors.items() if key.startswith(head)}
                    setattr(guard, name, StateSnapshot(int(about[name][0]), int(about[name][1]), saved))
        except (KeyError, TypeError) as error:
            raise ValueError(f"expected the state of a guard: {error}") from None
        return guard
