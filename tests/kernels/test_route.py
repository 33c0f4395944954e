"""Routing: falling scores, ties to the lower index, replay of the selection alone."""

import torch

from headrace.kernels.expert_mlp import plan
from headrace.kernels.route import Rule, route, sigmoid


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


LOGITS = torch.log(torch.tensor([[0.50, 0.30, 0.15, 0.04, 0.01]]))


def test_an_implausible_expert_makes_room_only_when_asked() -> None:
    replay = torch.tensor([[4, 0]])
    assert route(LOGITS, 2, True, replay)[1].tolist() == [[4, 0]], "strict by default"
    gates, experts = route(LOGITS, 2, True, replay, Rule(plausible=0.1))
    assert experts.tolist() == [[1, 0]], "0.01 < 0.1 x 0.30; the best that is not replayed takes its slot"
    torch.testing.assert_close(gates, torch.tensor([[0.375, 0.625]]))
    assert route(LOGITS, 2, True, torch.tensor([[2, 0]]), Rule(plausible=0.1))[1].tolist() == [[2, 0]], "plausible"
    assert route(LOGITS, 2, True, torch.tensor([[-1, -1]]), Rule(plausible=0.1))[1].tolist() == [[0, 1]], "no record"
    assert route(LOGITS, 3, True, torch.tensor([[4, 3, 1]]), Rule(plausible=0.5))[1].tolist() == [[0, 2, 1]]


def test_plausible_replay_never_names_an_expert_twice() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(300, 12, generator=generator) * 2
    replay = torch.stack([torch.randperm(12, generator=generator)[:4] for _ in range(300)])
    for share in (0.01, 0.3, 1.0, 5.0):
        _, experts = route(logits, 4, True, replay, Rule(plausible=share))
        assert all(len(set(row)) == 4 for row in experts.tolist())
    assert torch.equal(experts.sort(-1).values, route(logits, 4, True)[1].sort(-1).values), "5.0 keeps nothing"


def test_groups_and_correction_choose_but_do_not_weigh() -> None:
    rule = Rule(sigmoid=True, groups=2, kept=1, scale=2.0)
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.1]])
    gates, experts = route(logits, 2, True, None, rule)
    assert experts.tolist() == [[3, 2]], "the best pair, not the best expert, decides between groups"
    torch.testing.assert_close(gates.sum(), torch.tensor(2.0))
    pushed = route(logits, 2, True, None, rule, torch.tensor([0.0, 5.0, 0.0, 0.0]))[1]
    assert pushed.tolist() == [[1, 0]]
    forced, _ = route(logits, 2, False, torch.tensor([[1, 0]]), rule)
    torch.testing.assert_close(forced, 2.0 * torch.sigmoid(torch.tensor([[-3.0, 3.0]])))


def test_sigmoid_of_anything_has_a_gradient() -> None:
    x = torch.tensor([-1e4, -100.0, -5.0, 0.0, 5.0, 1e4], requires_grad=True)
    y = sigmoid(x)
    torch.testing.assert_close(y, torch.sigmoid(x))
    torch.autograd.backward(y.sum())
    assert x.grad is not None and bool(x.grad.isfinite().all()) and float(x.grad[3]) == 0.25
