"""A row's log-probability has the same bits alone and among others, whatever the number of torch threads."""

import pytest
import torch

from headrace.kernels.selected_logprob import from_logits


@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_row_of_a_large_vocabulary_is_added_in_one_order(threads: int) -> None:
    before = torch.get_num_threads()
    logits = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.arange(16)
    want = from_logits(logits, targets)
    try:
        torch.set_num_threads(threads)
        for row in range(16):
            got = from_logits(logits[row : row + 1], targets[row : row + 1])
            assert all(torch.equal(one, many[row : row + 1]) for one, many in zip(got, want, strict=True))
    finally:
        torch.set_num_threads(before)
