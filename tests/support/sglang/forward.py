"""New tokens of the double's requests, in passes of limited size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.policy.cache import KVCache
from headrace.policy.model import Model

CHUNK = 2048
"""Tokens of one forward pass: ordinary attention holds each score of a pass, 24 GB for 32,768 tokens at once."""


def forwarded(model: Model, new: Sequence[int], first: int, cache: KVCache) -> tuple[Tensor, Tensor]:
    """(hidden states of the last pass [n, D], routes of all new tokens int32 [N, layers, k]); first: their position."""
    table, parts, hidden = [list(range(cache.blocks))], [], torch.empty(0)
    for start in range(0, len(new), CHUNK):
        piece, recorder = new[start : start + CHUNK], list[Tensor]()
        hidden = model.forward_cached(torch.tensor(piece), [len(piece)], [first + start], table, cache, None, recorder)
        parts.append(torch.stack(recorder, 1) if recorder else torch.empty(len(piece), 0, 0))
    return hidden, torch.cat(parts).to(torch.int32)
