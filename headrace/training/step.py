"""One step: makes a version from a batch, with the same bits at every repetition.

The idea: a step is a pure function of the trainer's state, the batch of a manifest and the recipe (`gradient` computes
the gradient). Groups without an advantage have no gradient: they are not computed, but they count in the divisor, the
figures and the ledger.

A batch may be split into several updates (`minibatches`), in the order of its trajectories. The proximal policy of the
decoupled objective is then the trainer's own log-probabilities from before the first of them. All or nothing: when one
update is refused, the updates before it are undone.

Trade-off: one pass over each batch (a single epoch, as in Composer 2). More passes would need a clipped ratio.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.algorithms.mismatch import Mismatch, mismatch
from headrace.algorithms.staleness import histogram
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment
from headrace.training.figures.work import expert_rows
from headrace.training.gradient import (
    Gradient,
    GradientPart,
    Helpers,
    Recipe,
    accumulate,
    computed,
    minibatches,
    proximal_logprobs,
)
from headrace.training.guard import BatchMetrics, Guard, StateSnapshot, refusal
from headrace.training.outcome import StepOutcome, refuse
from headrace.training.schedule import learning_rate
from headrace.training.state import TrainerState


class _Update(NamedTuple):
    """One update of a batch: its gradient, the gradient's norm, and the reason for which it was not made."""

    gradient: Gradient
    norm: float
    reason: str = ""
    detail: str = ""
    restored: int = -1


def take(
    state: TrainerState, batch: Batch, recipe: Recipe, guard: Guard | None = None, helpers: Helpers | None = None
) -> StepOutcome:
    """Train on a batch: version k becomes k + 1. A refused update also makes version k + 1, with the bytes of k.

    A batch with a token older than `recipe.bound` versions is refused (Law 2). guard: the run's guard, which may
    restore an earlier version's bytes. With `helpers.data_parallel` every process calls this with the same arguments,
    and all get the same outcome. Nothing is written outside of `state` and `guard`.
    """
    started = time.perf_counter()
    helpers = helpers or Helpers()
    versions = batch.versions()
    ages = histogram(state.version, versions)
    oldest = max(map(int, ages), default=0)
    if oldest > recipe.bound:
        why = f"a token is {oldest} versions old, the bound is {recipe.bound}"
        return refuse(state, "too_stale", why, hashed=helpers.hashed)
    discarded = guard.refuses(versions) if guard is not None else ""
    if discarded:
        return refuse(state, "discarded_version", discarded, hashed=helpers.hashed)
    watch = guard if guard is not None and recipe.algorithm.guard_k1 > 0.0 else None
    step = _Step(state, batch, recipe, watch, helpers)
    rate = step.rate
    updates, before = step.run()
    last = updates[-1]
    if recipe.algorithm.balance_rate and not last.reason:
        # Routes of all attempts, also of those without a gradient: the load is that of sampling.
        state.balance(expert_rows(state.model.config, batch.segments), recipe.algorithm.balance_rate)
    state.version += 1
    tokens = max(1, before.tokens)
    return StepOutcome(
        version=state.version,
        state_hash=state.hash() if helpers.hashed else "",
        failed=last.reason,
        detail=last.detail,
        restored=last.restored,
        loss=sum(update.gradient.loss for update in updates) / len(updates),
        grad_norm=max(update.norm for update in updates),
        learning_rate=rate,
        reward_mean=batch.reward,
        turn_reward_mean=statistics.fmean(batch.turn_rewards) if batch.turn_rewards else None,
        pass_rate=batch.passed / batch.trajectories,
        trained_slots=0 if last.reason else batch.trajectories,
        tokens=batch.tokens,
        computed_tokens=before.tokens,
        staleness=ages,
        staleness_max=oldest,
        k1=before.k1,
        k3=before.k3,
        entropy=sum(update.gradient.entropy for update in updates) / tokens,
        clipped=sum(update.gradient.clipped for update in updates) / tokens,
        dual_clipped=sum(update.gradient.dual_clipped for update in updates) / tokens,
        metrics={
            name: sum(update.gradient.metrics.get(name, 0.0) for update in updates) / tokens
            for name in dict.fromkeys(name for update in updates for name in update.gradient.metrics)
        },
        seconds=time.perf_counter() - started - step.waited_s,
    )


class _Step:
    """The updates of one batch."""

    def __init__(
        self, state: TrainerState, batch: Batch, recipe: Recipe, watch: Guard | None, helpers: Helpers
    ) -> None:
        self.state, self.batch, self.recipe, self.watch, self.helpers = state, batch, recipe, watch, helpers
        self.segments = computed(batch, recipe.algorithm)
        self.waited_s = 0.0
        """Seconds in `helpers.before_update`."""
        self.rate = learning_rate(recipe.algorithm, state.step) * (watch.factor if watch is not None else 1.0)

    def run(self) -> tuple[list[_Update], Mismatch]:
        """Make all updates, or none: the last one then has the reason. Also returns the mismatch between samplers and
        the model from before the step."""
        algorithm = self.recipe.algorithm
        parts = minibatches(self.segments, algorithm.minibatches)
        proximal: dict[int, Tensor] | None = None
        undo: StateSnapshot | None = None
        if len(parts) > 1:
            proximal = proximal_logprobs(self.state.model, self.segments, self.recipe, self.helpers)
            undo = StateSnapshot.of(self.state)
        updates: list[_Update] = []
        before = mismatch(torch.empty(0), torch.empty(0))
        for segments in parts:
            gradient = accumulate(
                self.state, self.batch, self.recipe, GradientPart(segments, len(parts), proximal), self.helpers
            )
            part_mismatch = mismatch(gradient.trainer, gradient.sampler)
            first = not updates
            if first:
                self._wait()
                before = part_mismatch if proximal is None else _mismatch_before(self.segments, proximal)
            update = self._judge(gradient, part_mismatch, before if first else None)
            updates.append(update)
            if update.reason:
                self.state.zero_grad()
                if not first and undo is not None:
                    undo.restore(self.state)
                break
            if part_mismatch.tokens:
                norm = update.norm
                self.state.apply(self.rate, min(1.0, algorithm.grad_clip / norm) if norm > 0.0 else 1.0)
        return updates, before

    def _wait(self) -> None:
        began = time.perf_counter()
        self.helpers.before_update()
        self.waited_s = time.perf_counter() - began

    def _judge(self, gradient: Gradient, mismatch: Mismatch, before: Mismatch | None) -> _Update:
        """The update of a gradient, with the reason when it is refused. mismatch: that of its part; before: the
        mismatch of the batch before the step, given for the first update alone."""
        algorithm, norm = self.recipe.algorithm, self.state.gradient_norm()
        k1 = (before or mismatch).k1
        reason = refusal(gradient.loss, norm, k1, algorithm.max_grad_norm)
        if self.watch is not None and before is not None and before.tokens and not reason:
            metrics = BatchMetrics(before.k1, self.batch.reward, gradient.entropy / max(1, mismatch.tokens))
            why = self.watch.look(self.state, metrics, algorithm, self.recipe.bound)
            if why:
                restored = self.watch.roll_back(self.state, algorithm)
                where = f"back to version {restored}" if restored >= 0 else "no good version is held yet"
                return _Update(gradient, norm, "collapse", f"{why}; {where}", restored)
        detail = f"loss {gradient.loss:.4g}, gradient norm {norm:.4g}, k1 {k1:.4g}" if reason else ""
        return _Update(gradient, norm, reason, detail)


def _mismatch_before(segments: Sequence[Segment], proximal: Mapping[int, Tensor]) -> Mismatch:
    """The mismatch between the samplers and the model from before the step."""
    trainer = torch.cat([proximal[segment.index] for segment in segments])
    return mismatch(trainer, torch.cat([segment.behaviour for segment in segments]))
