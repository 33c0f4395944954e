"""The gate that a candidate version passes before it serves users, as pure functions over its GateState.

candidate -> benchmark -> shadow -> canary stages -> promoted; or held (no evidence that it is better, or too few
results in time), or rolled back (users rate it worse). The benchmark decides on paired tasks; users' ratings only guard
against harm, because a small product never has enough of them to show a gain. The harm test is valid whenever it is
evaluated, and a canary's stages add to one body of evidence, each with its own share (`algorithms.sequential`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from headrace.algorithms.paired import paired_difference
from headrace.algorithms.sequential import log_evidence, p_value
from headrace.config import Gate
from headrace.messages.product import Arm, GateState, GateVerdict, PairedFigures, Stage
from headrace.messages.rollout import PolicyRef

ALPHA = 0.05
"""Probability of a false verdict: half for the benchmark, half for the harm test of all canary stages together."""
SHADOW_FAILURES = 0.05
"""Share of shadow turns that may fail."""
STAGE_S = 86400.0
"""Seconds after which a stage ends with the verdict `held`."""
RUNNING: tuple[Stage, ...] = ("benchmark", "shadow", "canary")
"""Stages of a candidate that has no verdict yet."""


class GateLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that `headrace gate` prints: one verdict, or the current state of the gate."""

    verdict: GateVerdict | None = None
    now: GateState | None = None


class Move(NamedTuple):
    """The next state, and the verdict that says why."""

    state: GateState
    verdict: GateVerdict


def begin(run: str, candidate: PolicyRef, promoted: PolicyRef, rules: Gate, now: float, seen_seq: int) -> Move:
    """The first state of a candidate. now: seconds since the epoch, as in all functions here. seen_seq: sequence of the
    newest rating from before the candidate."""
    state = GateState(run=run, stage="benchmark", candidate=candidate, promoted=promoted, since=now, seen_seq=seen_seq)
    move = _to(state, "benchmark", "a new version", now)
    return move if rules.tasks else _after_benchmark(move.state, rules, now, "no benchmark is configured")


def measured(
    state: GateState, candidate: Mapping[str, float], promoted: Mapping[str, float], rules: Gate, now: float
) -> Move | None:
    """The state after the benchmark; None when no benchmark is running. candidate, promoted: task to the share of its
    trials that the version passed, 0 to 1, without tasks that failed in the infrastructure."""
    if state.stage != "benchmark":
        return None
    paired = paired_difference(promoted, candidate, ALPHA)  # each side of the interval has half of alpha
    figures = PairedFigures(tasks=paired.tasks, won=paired.won, lost=paired.lost, lower=paired.low)
    state = msgspec.structs.replace(state, benchmark=figures)
    if not paired.tasks:
        return _to(state, "held", "no task was measured on both versions", now)
    text = f"lower bound {paired.low:+.3f} over {paired.tasks} tasks, {paired.won} won, {paired.lost} lost"
    if paired.low <= rules.margin:
        detectable = f"a difference of {paired.detectable:.3f} is found with probability 0.8"
        return _to(state, "held", f"{text}: not above the margin of {rules.margin:+.3f}; {detectable}", now)
    return _after_benchmark(state, rules, now, text)


def shadowed(state: GateState, ok: bool, rules: Gate, now: float) -> Move | GateState:
    """The state after a shadow turn."""
    if state.stage != "shadow":
        return state
    state = msgspec.structs.replace(state, shadowed=state.shadowed + 1, shadow_failed=state.shadow_failed + (not ok))
    if state.shadowed < rules.shadow:
        return state
    share = state.shadow_failed / state.shadowed
    text = f"{state.shadow_failed} of {state.shadowed} shadow turns failed"
    if share > SHADOW_FAILURES:
        return _to(state, "held", text, now)
    return _canary(state, rules, now, text)


def rated(
    state: GateState, policy: PolicyRef, up: bool, seq: int, rules: Gate, now: float, began: float = math.inf
) -> Move | GateState:
    """The state after a user's rating of a session that `policy` served; unchanged for a rating that does not count.

    began: when the session began, in seconds since the epoch. One from before the stage was assigned under another
    share, so it is no evidence here.
    """
    if state.stage != "canary" or seq <= state.seen_seq:
        return state
    state = msgspec.structs.replace(state, seen_seq=seq)
    if began < state.since:
        return state
    if policy == state.candidate:
        state = msgspec.structs.replace(state, treated=_plus(state.treated, up))
    elif policy == state.promoted:
        state = msgspec.structs.replace(state, control=_plus(state.control, up))
    else:
        return state
    p = harm(state)
    arms = f"{state.treated.up} of {state.treated.sessions} up, against {state.control.up} of {state.control.sessions}"
    if p <= ALPHA / 2:
        return _to(state, "rolled_back", f"users rate it worse: {arms}, p = {p:.2g}", now)
    if state.treated.sessions < rules.sessions:
        return state
    if state.step + 1 < len(rules.canary):
        return _canary(state, rules, now, arms)
    return _to(state, "promoted", arms, now, share=1.0)


def overdue(state: GateState, now: float) -> Move | None:
    """The verdict `held` once a stage has lasted longer than `STAGE_S`, with too few ratings or trials for a decision;
    None before."""
    if state.stage in RUNNING and now - state.since > STAGE_S:
        return _to(state, "held", f"{state.stage} has not ended within {STAGE_S:g} s", now)
    return None


def ended(state: GateState, stage: Stage, reason: str, now: float) -> Move:
    """The state after an operator's decision."""
    return _to(state, stage, reason, now)


def harm(state: GateState) -> float:
    """The p-value, valid at every look, of the hypothesis that users rate the candidate no worse in all stages so
    far."""
    return p_value(_evidence(state))


def _evidence(state: GateState) -> float:
    control, treated = state.control, state.treated
    return state.evidence + log_evidence(control.up, control.sessions, treated.up, treated.sessions, state.share)


def _plus(arm: Arm, up: bool) -> Arm:
    return Arm(sessions=arm.sessions + 1, up=arm.up + up)


def _after_benchmark(state: GateState, rules: Gate, now: float, why: str) -> Move:
    if rules.shadow:
        return _to(state, "shadow", why, now)
    return _canary(state, rules, now, why)


def _canary(state: GateState, rules: Gate, now: float, why: str) -> Move:
    """The next canary stage; the promotion if the configuration has no canary stages."""
    step = state.step + 1 if state.stage == "canary" else 0
    if not rules.canary:
        return _to(state, "promoted", why, now, share=1.0)
    return _to(state, "canary", why, now, share=rules.canary[step], step=step)


def _to(state: GateState, stage: Stage, why: str, now: float, *, share: float = 0.0, step: int = 0) -> Move:
    verdict = GateVerdict(
        run=state.run,
        candidate=state.candidate,
        promoted=state.promoted,
        stage=stage,
        share=share,
        reason=why,
        benchmark=state.benchmark,
        control=state.control,
        treated=state.treated,
        harm_p=harm(state),
        shadowed=state.shadowed,
        shadow_failed=state.shadow_failed,
    )
    after = msgspec.structs.replace(
        state,
        stage=stage,
        share=share,
        step=step,
        since=now,
        evidence=_evidence(state),
        control=Arm(),
        treated=Arm(),
    )
    return Move(after, verdict)
