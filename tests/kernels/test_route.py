"""Routing: falling scores, ties to the lower index, replay of the selection alone."""

import torch

from headrace.kernels.expert_mlp import plan
from headrace.kernels.route import route


def test_the_best_in_falling_order_and_ties_to_the_lower_index() -> None:
    gates, experts = route(torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 3, False)
    assert experts.tolist() == [[1, 3, 2], [0, 1, 2]]
    torch.testing.assert_close(gates[1], torch.full((3,), 0.25))


def test_normalised_gates_add_up_to_one() -> None:
    gates, _ = route(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), 2, True)
    torch.testing.assert_close(gates.sum(1), torch.ones(50))


def test_replay_takes_the_selection_and_the_live_scores() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [0.0, 1.0, 5.0]])
    gates, experts = route(logits, 2, False, torch.tensor([[2, 0], [-1, -1]]))
    assert experts.tolist() == [[2, 0], [2, 1]]
    torch.testing.assert_close(gates, torch.softmax(logits, -1).gather(1, experts))


def test_a_plan_puts_each_pair_into_its_experts_part() -> None:
    experts = torch.tensor([[3, 0], [3, 1], [0, 3], [3, 0], [3, 1]])
    p = plan(experts, 5, 4)
    assert p.parts == [(0, 0, 4), (1, 4, 8), (3, 8, 16)] and p.rows == 16
    for pair, row in enumerate(p.slots.tolist()):
        part = next(expert for expert, first, end in p.parts if first <= row < end)
        assert part == int(experts.view(-1)[pair]) and int(p.source[row]) == pair // 2
    assert len(set(p.slots.tolist())) == 10
