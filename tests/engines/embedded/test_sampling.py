"""Draws from wide vocabularies, a few rows at a time, against the definition."""

import numpy as np
import torch

from headrace.engines.embedded import sampling
from headrace.kernels.selected_logprob import from_logits, scaled


def test_rows_drawn_in_parts_follow_the_inverse_distribution_function() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 7, sampling._NUMBERS // 3 + 1  # two rows a part, and one row in the last
    logits = (torch.randn(rows, vocab, generator=generator) * 4).bfloat16()
    heat = torch.tensor([1.0, 0.7, 0.0, 1.0, 2.0, 0.0, 0.3])
    chance = torch.rand(rows, generator=generator, dtype=torch.float64)
    ids, logprobs = sampling.draw(logits, heat, chance)
    warm = scaled(logits, heat)
    for row in range(rows):
        sums = np.cumsum(torch.exp(warm[row] - warm[row].amax()).double().numpy())
        greedy = int(warm[row].argmax())
        assert ids[row] == (np.searchsorted(sums, float(chance[row]) * sums[-1]) if heat[row] else greedy)
    assert torch.equal(logprobs, from_logits(warm, ids)[0])  # the trainer's bits


def test_a_row_that_is_not_finite_gives_an_id_and_a_log_probability_that_is_not_finite() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3, [0.0, -torch.inf, 1.0]])
    ids, logprobs = sampling.draw(logits, torch.ones(4), torch.full((4,), 0.1, dtype=torch.float64))
    assert 0 <= int(ids.min()) and int(ids.max()) < 3
    assert torch.isfinite(logprobs).tolist() == [False, False, False, True]
