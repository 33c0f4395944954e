"""Gradients of runs of tokens, and the order in which they are added."""

from bisect import bisect_left

import pytest
import torch
from torch import Tensor, nn

from headrace.config import Trainer
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.token_runs.sharing import OneProcess
from headrace.policy.token_runs.weights import borders, lengths_between, pairwise_sum, replicas
from tests.support import tiny

TIED = PolicyConfig(
    dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=0, top_k=0, expert_dim=32, vocab=64, tied=True
)


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 5, 6, 8, 12])
def test_processes_that_the_settings_allow_add_up_subtrees_of_one_process(runs: int) -> None:
    draw = torch.Generator().manual_seed(runs)
    parts = [torch.randn(256, generator=draw) for _ in range(runs)]
    whole = pairwise_sum(parts)
    allowed = [count for count in range(1, runs + 1) if Trainer(ranks=count, context_ranks=count).divides(runs)]
    assert {1, runs} <= set(allowed)
    for count in allowed:
        each = runs // count
        shares = [pairwise_sum(parts[start : start + each]) for start in range(0, runs, each)]
        assert torch.equal(pairwise_sum(shares), whole), count
    if runs == 12:
        assert allowed == [1, 3, 6, 12]
        thirds = [pairwise_sum(parts[start : start + 3]) for start in range(0, 12, 3)]
        assert not torch.equal(pairwise_sum(thirds), whole), "three runs each are no subtree"


def test_runs_cover_all_tokens_and_nest_in_those_of_fewer_processes() -> None:
    for tokens in (7, 64, 1001):
        cuts = borders(tokens, 8)
        assert cuts[0] == 0 and cuts[-1] == tokens == sum(lengths_between(cuts))
        assert max(lengths_between(cuts)) - min(lengths_between(cuts)) <= 1
        assert cuts[::2] == borders(tokens, 4) and cuts[::4] == borders(tokens, 2)


def test_a_replica_shares_all_but_the_parameters_and_collects_the_gradient() -> None:
    module = nn.Linear(3, 2, bias=False)
    assert replicas(module, 1) == [module]
    first, second = replicas(module, 2)
    assert torch.equal(first.weight, module.weight) and first.weight.data_ptr() == module.weight.data_ptr()
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    torch.autograd.backward(first.forward(x[:1]).sum() + 2.0 * second.forward(x[1:]).sum())
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[9.0, 12.0, 15.0]] * 2


def gradients(runs: int) -> dict[str, Tensor]:
    """Of a loss over a packed micro-batch that is cut into runs."""
    model = Model(TIED, tiny.numerics(TIED), seed=1)
    model.shared = OneProcess(runs) if runs > 1 else None
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 64, (37,), generator=draw)
    rows = torch.tensor([3, 4, 5, 17, 30, 31, 32, 33, 34, 35])
    logp, _ = model.sampled_logprobs(
        ids, (20, 17), None, rows, ids[rows + 1], 1.0, lambda cuts: [bisect_left(rows.tolist(), cut) for cut in cuts]
    )
    torch.autograd.backward(logp.sum())
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_a_tied_embedding_gets_the_gradients_of_its_two_uses_run_by_run() -> None:
    plain, cut = gradients(1), gradients(4)
    assert plain.keys() == cut.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(cut[name], gradient) for name, gradient in plain.items()), "rounded otherwise"
