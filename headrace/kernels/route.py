"""Top-k routing of a mixture of experts, with replay of a recorded selection.

Idea: the sampler records which experts each token went to; the trainer replays the selection and nothing else. Scores
are computed again from live logits, gathered at the recorded experts and renormalised, so the gradient still flows
into the router (R3, arXiv 2510.11370). Stale weights of a selection are never replayed.

Layout: selections are [N, k] int64 in falling score, which is also the order in which expert outputs are added; equal
scores go to the lower index, so every device breaks ties alike. A row of -1 has no record: the live selection stands.
"""

import torch
from torch import Tensor


def route(logits: Tensor, k: int, normalise: bool, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [N, E] -> (gate scores float32 [N, k], experts int64 [N, k]).

    replay [N, k] int64: experts to use instead of the k best; -1 in a row's first slot falls back to the live ones.
    """
    scores = torch.softmax(logits.float(), -1)
    if replay is None:
        experts = best(scores, k)
    else:
        missing = replay[:, :1] < 0
        experts = torch.where(missing, best(scores, k), replay) if bool(missing.any()) else replay
    gates = scores.gather(1, experts)
    if normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, experts


def best(scores: Tensor, k: int) -> Tensor:
    """Indices int64 [N, k] of the k largest, in falling order, the lower index first among equals."""
    return scores.detach().sort(stable=True, dim=-1, descending=True).indices[:, :k].contiguous()
