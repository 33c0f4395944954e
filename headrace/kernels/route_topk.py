"""Top-k routing on a GPU, with replay: one program per token, ties to the lower index, gates from live scores.

Idea: the twin is `route.route`; a program holds one token's scores. Each of k rounds takes the largest score, among
equals the one with the lowest index, and removes it. A recorded selection replaces the live one where the token has a
record (its first slot is not -1). Gates are always the live scores at the selection, so the router learns. As in the
twin, correction and groups affect the choice and not the gates. NaN counts as the largest score, so that every choice
names an expert: another number would be a row outside of the experts' memory.

Backward recomputes the scores. The selection has no gradient; the gates' gradient passes through the normalisation and
the softmax or sigmoid.

Layout: logits [N, E], replay and experts int64 [N, k], gates float32 [N, k]. Groups need E and E / groups to be powers
of two (DeepSeek-V3: 256 and 32), because they are a reshape of the row.
Trade-off: k passes over the row's E scores; for k = 8 of 256 experts they cost far less than the router's product.

Error: selections are exact where scores are (a score's error against float64 is below 2^-22 of the largest); gates are
within 1e-6. `operators` calls it for
tensors on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import dispatch
from headrace.kernels.dispatch import jit, tl
from headrace.kernels.route import SOFTMAX, Rule, plausible


@jit
def _scores(logits, row, e, live, at, SIGMOID: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's scores [BE], 0 beyond E."""
    value = tl.load(logits + row * e + at, mask=live, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-tl.where(value < -80.0, -80.0, value)))  # tl.maximum would drop a NaN
    else:
        scores = tl.exp(value - tl.max(value, 0))
        scores = scores / tl.sum(scores, 0)
    return tl.where(live, scores, 0.0)


@jit
def _first(choice, at, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of the largest, the lowest index among equals."""
    return tl.min(tl.where(choice == tl.max(choice, 0), at, E), 0)


@jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, correction, replay, gates, experts, e, scale,
    K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, REPLAY: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One token."""
    row, at, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BE), tl.arange(0, BK)
    live = at < e
    scores = _scores(logits, row, e, live, at, SIGMOID)
    choice = scores
    if CORRECTED:
        choice = choice + tl.load(correction + at, mask=live, other=0.0)
    choice = tl.where(choice != choice, float("inf"), choice)  # NaN is the largest, as in the twin's sort
    choice = tl.where(live, choice, float("-inf"))
    if KEPT < GROUPS:
        grouped, member = tl.reshape(choice, (GROUPS, BE // GROUPS)), tl.arange(0, BE // GROUPS)
        best = tl.max(grouped, 1)
        index = tl.min(tl.where(grouped == best[:, None], member[None, :], BE), 1)
        second = tl.max(tl.where(member[None, :] == index[:, None], float("-inf"), grouped), 1)
        strength, number = best + second, tl.arange(0, GROUPS)
        best_groups = tl.zeros((GROUPS,), dtype=tl.int32)
        for _ in tl.static_range(KEPT):
            largest = _first(strength, number, GROUPS)
            best_groups = tl.where(number == largest, 1, best_groups)
            strength = tl.where(number == largest, float("-inf"), strength)
        choice = tl.reshape(tl.where(best_groups[:, None] != 0, grouped, float("-inf")), (BE,))
    chosen = tl.zeros((BK,), dtype=tl.int32)
    for place in tl.static_range(K):
        largest = _first(choice, at, BE)
        chosen = tl.where(slot == place, largest, chosen)
        choice = tl.where(at == largest, float("-inf"), choice)
    if REPLAY:
        recorded = tl.load(replay + row * K + slot, mask=slot < K, other=0).to(tl.int32)
        recorded_row = tl.load(replay + row * K) >= 0
        chosen = tl.where(recorded_row, recorded, chosen)
    picked = tl.sum(tl.where(chosen[:, None] == at[None, :], scores[None, :], 0.0), 1)
    if NORMALISE:
        total = tl.sum(tl.where(slot < K, picked, 0.0), 0)
        picked = picked / (total + 1e-20 if SIGMOID else total)
    tl.store(gates + row * K + slot, picked * scale, mask=slot < K)
    tl.store(experts + row * K + slot, chosen.to(tl.int64), mask=slot < K)


@jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad, logits, experts, out, e, scale,
    K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One token: computes the gradient of the logits from that of the gates."""
    row, at, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BE), tl.arange(0, BK)
    live = at < e
    scores = _scores(logits, row, e, live, at, SIGMOID)
    chosen = tl.load(experts + row * K + slot, mask=slot < K, other=-1).to(tl.int32)
    slope = tl.load(grad + row * K + slot, mask=slot < K, other=0.0) * scale
    hits = (chosen[:, None] == at[None, :]).to(tl.float32)
    if NORMALISE:
        picked = tl.sum(hits * scores[None, :], 1)
        total = tl.sum(picked, 0) + (1e-20 if SIGMOID else 0.0)
        slope = (slope - tl.sum(slope * picked, 0) / total) / total
    by_score = tl.sum(hits * slope[:, None], 0)
    if SIGMOID:
        by_logit = by_score * scores * (1.0 - scores)
    else:
        by_logit = scores * (by_score - tl.sum(by_score * scores, 0))
    tl.store(out + row * e + at, by_logit.to(out.dtype.element_ty), mask=live)


def _blocks(e: int, k: int) -> dict[str, int]:
    return {"K": k, "BE": dispatch.power_of_two(e), "BK": dispatch.power_of_two(k)}


def route_triton(
    logits: Tensor,
    k: int,
    normalise: bool,
    replay: Tensor | None = None,
    rule: Rule = SOFTMAX,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of `route.route` for a GPU: logits [N, E] -> (gates float32 [N, k], experts int64 [N, k]). No autograd.

    ValueError when groups are not powers of two.
    """
    logits = logits.contiguous()
    rows, e = logits.shape
    limited = rule.kept < rule.groups
    if limited and (e != dispatch.power_of_two(e) or e // rule.groups != dispatch.power_of_two(e // rule.groups)):
        raise ValueError(f"expected powers of two of experts and of experts per group, got {e} in {rule.groups} groups")
    if replay is not None and rule.plausible > 0.0:
        strict = rule._replace(plausible=0.0)
        live = route_triton(logits, k, False, None, strict, correction)[1]
        scores = torch.sigmoid(logits.float()) if rule.sigmoid else torch.softmax(logits.float(), -1)
        believed = plausible(scores, live, replay.clamp(min=0), rule.plausible)
        mixed = torch.where(replay[:, :1] < 0, live, believed)
        return route_triton(logits, k, normalise, mixed, strict, correction)
    gates = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits,
            logits if correction is None else correction.float().contiguous(),
            experts if replay is None else replay.contiguous(),
            gates,
            experts,
            e,
            rule.scale,
            **_blocks(e, k),
            GROUPS=rule.groups if limited else 1,
            KEPT=rule.kept if limited else 1,
            SIGMOID=rule.sigmoid,
            CORRECTED=correction is not None,
            REPLAY=replay is not None,
            NORMALISE=normalise,
        )
    return gates, experts


def route_backward_triton(
    grad: Tensor, logits: Tensor, experts: Tensor, normalise: bool, rule: Rule = SOFTMAX
) -> Tensor:
    """Gradient of logits [N, E] from that of the gates, float32 [N, k], for the selection that forward returned."""
    logits = logits.contiguous()
    rows, e = logits.shape
    out = torch.empty_like(logits)
    if rows:
        _backward_kernel[(rows,)](
            grad.float().contiguous(),
            logits,
            experts.contiguous(),
            out,
            e,
            rule.scale,
            **_blocks(e, experts.shape[1]),
            SIGMOID=rule.sigmoid,
            NORMALISE=normalise,
        )
    return out
