"""Top-k routing of a mixture of experts, with replay of a recorded selection.

Idea: the sampler records the experts of each token; the trainer replays that selection and nothing else. Scores are
computed again from live logits, gathered at the recorded experts and renormalised, so the gradient still reaches the
router (R3, arXiv 2510.11370). The sampler's gate values are never replayed.

Two families share this: softmax scores (Qwen3), and sigmoid scores (DeepSeek-V3, arXiv 2412.19437 and 2408.15664). For
the latter, a correction is added for the choice among the best groups of experts, and left out of the gates.

Layout: selections are [N, k] int64 by descending score, which is also the order in which expert outputs are added. Of
equal scores the lower index wins, so every device breaks ties alike; NaN counts as the largest. A row of -1 has no
record: the live selection is used. Recorded experts exist: `training.batches.segment` refuses others.
Trade-off: a full stable sort of E scores instead of a top-k, whose order among equal scores is undefined.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """How experts are chosen and weighted, beyond their number."""

    sigmoid: bool = False
    groups: int = 1
    kept: int = 1
    """Only experts of the best `kept` of `groups` groups are chosen; a group's score is the sum of its best two."""
    scale: float = 1.0
    """Factor on the gate scores, after normalising."""
    plausible: float = 0.0
    """A replayed expert stays only if its score is at least this share of the weakest live choice's; the best live
    experts take the slots of the others. 0: replay is strict."""


SOFTMAX = Rule()


def route(
    logits: Tensor,
    k: int,
    normalise: bool,
    replay: Tensor | None = None,
    rule: Rule = SOFTMAX,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [N, E] -> (gate scores float32 [N, k], experts int64 [N, k]).

    replay [N, k] int64: experts to use instead of the k best; -1 in a row's first slot selects the live ones.
    correction [E]: added to scores for the choice alone. normalise: divide each row's gates by their sum.
    """
    scores = sigmoid(logits.float()) if rule.sigmoid else torch.softmax(logits.float(), -1)
    if replay is None:
        experts = _live(scores, k, rule, correction)
    else:
        missing = replay[:, :1] < 0
        if rule.plausible > 0.0:
            live = _live(scores, k, rule, correction)
            experts = torch.where(missing, live, plausible(scores.detach(), live, replay.clamp(min=0), rule.plausible))
        elif bool(missing.any()):
            experts = torch.where(missing, _live(scores, k, rule, correction), replay)
        else:
            experts = replay
    gates = scores.gather(1, experts)
    if normalise:
        total = gates.sum(-1, keepdim=True)
        gates = gates / (total + 1e-20 if rule.sigmoid else total)
    return (gates if rule.scale == 1.0 else gates * rule.scale), experts


def route_backward(grad: Tensor, logits: Tensor, experts: Tensor, normalise: bool, rule: Rule) -> Tensor:
    """Gradient of logits from that of the gates [N, k], for the experts that `route` returned: autograd's, by hand."""
    wide = logits.float()
    raised = torch.exp(-wide.clamp(min=-80.0))
    scores = 1.0 / (1.0 + raised) if rule.sigmoid else torch.softmax(wide, -1)
    if rule.scale != 1.0:
        grad = grad * rule.scale
    if normalise:
        picked = scores.gather(1, experts)
        total = picked.sum(-1, keepdim=True) + (1e-20 if rule.sigmoid else 0.0)
        grad = grad / total + (-grad * ((picked / total) / total)).sum(-1, keepdim=True)
    by_score = torch.zeros_like(scores).scatter_add_(1, experts, grad)
    if rule.sigmoid:
        slope = -(by_score * -(scores * scores) * raised)
        return torch.where(wide >= -80.0, slope, 0.0).to(logits.dtype)
    by_logit: Tensor = torch.ops.aten._softmax_backward_data(by_score, scores, -1, torch.float32)
    return by_logit.to(logits.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), about 0 below -80. By hand, because torch's float32 sigmoid rounds the last elements of a
    buffer differently."""
    return 1.0 / (1.0 + torch.exp(-x.clamp(min=-80.0)))


def best(scores: Tensor, k: int) -> Tensor:
    """Indices int64 [N, k] of the k largest scores, descending, the lower index first among equals."""
    return scores.detach().sort(stable=True, dim=-1, descending=True).indices[:, :k].contiguous()


def _live(scores: Tensor, k: int, rule: Rule, correction: Tensor | None) -> Tensor:
    choice = scores.detach()
    if correction is not None:
        choice = choice + correction
    if rule.kept < rule.groups:
        grouped = choice.view(len(choice), rule.groups, -1)
        strength = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        in_best_groups = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, best(strength, rule.kept), True)
        choice = grouped.masked_fill(~in_best_groups[..., None], -torch.inf).view_as(choice)
    return best(choice, k)


def plausible(scores: Tensor, live: Tensor, replay: Tensor, share: float) -> Tensor:
    """Replayed experts [N, k] without those whose score is below `share` of the weakest of `live` [N, k].

    Freed slots take the best of `live` that are not replayed already. After the filter in prime-rl (#2703).
    """
    floor = scores.gather(1, live).amin(-1, keepdim=True) * share
    keep = scores.gather(1, replay) >= floor
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, replay, keep)
    spare = live.gather(1, taken.gather(1, live).to(torch.int8).argsort(dim=-1, stable=True))
    slot = ((~keep).cumsum(-1) - 1).clamp(min=0)
    return torch.where(keep, replay, spare.gather(1, slot))
