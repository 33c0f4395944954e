"""Weights that do not learn cost no product in a backward pass, and the gradients of the others keep their bits."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from headrace.kernels import dispatch, operators
from headrace.policy.adapters import low_rank
from headrace.policy.adapters.shape import resolved
from headrace.policy.model import Model
from tests.kernels.test_operators import EXACT, POLICIES, grown

RANK = 5
# No padded number of rows is 34, 33 or 66, so a product's shape tells whether it is a weight's gradient.
BASE = msgspec.structs.replace(POLICIES["mixture"], dtype="float32", expert_format="", dim=34, expert_dim=33)
POLICY = msgspec.structs.replace(BASE, adapter=resolved(BASE, RANK, 10.0, ()))


class Products(TorchDispatchMode):
    """Notes the shapes of products' results, and what the backward operators are told of their weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []
        self.told: dict[str, set[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in ("mm", "addmm"):
            self.shapes.append(tuple(sorted(out.shape)))
        if name == "linear_backward":
            self.told.setdefault(name, set()).add((RANK in args[2].shape, args[-1]))
        elif name.endswith("_backward"):
            self.told.setdefault(name, set()).add(args[-2:] if name == "experts_backward" else args[-1:])
        return out


def gradients(model: Model) -> tuple[dict[str, Tensor], Products]:
    """The gradients of the parameters that have one, and the products of the backward pass."""
    ids, lengths = torch.arange(81) * 7 % POLICY.vocab, (70, 11)
    logp, _ = model.selected_logprobs(model(ids, lengths), ids.flip(0), 0.9)
    with Products() as seen:
        torch.autograd.backward(logp.sum())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


def adapted(frozen: bool) -> Model:
    """A mixture with adapters that do something; frozen: nothing else learns."""
    model = Model(POLICY, EXACT, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if low_rank.is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            parameter.requires_grad_(low_rank.is_adapter(name) or not frozen)
    return model


def test_a_step_with_adapters_multiplies_for_no_frozen_weight() -> None:
    every, with_all = gradients(adapted(False))
    some, with_adapters = gradients(adapted(True))
    assert set(some) == {name for name in every if low_rank.is_adapter(name)} and len(some) > 4
    assert all(torch.equal(some[name], every[name]) for name in some)
    matrices = {tuple(sorted(p.shape[-2:])) for name, p in adapted(True).named_parameters() if p.dim() > 1}
    matrices -= {shape for shape in matrices if RANK in shape}
    learned = [shape for shape in with_all.shapes if shape in matrices]
    assert {(34, 66), (33, 34), (34, 64)} < set(learned), "experts, head and projections"
    assert not [shape for shape in with_adapters.shapes if shape in matrices]


def test_the_operators_are_told_which_weights_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = gradients(adapted(True))
    monkeypatch.setattr(dispatch, "OPERATORS_ON_CPU", True)
    got, seen = gradients(adapted(True))
    assert all(torch.equal(got[name], want[name]) for name in want) and set(got) == set(want)
    assert seen.told["linear_backward"] == {(True, True), (False, False)}, "adapters learn, projections do not"
    assert seen.told["selected_logprob_backward"] == {(False,)}
    assert seen.told["experts_backward"] == {(False, False)}
    every, seen = gradients(adapted(False))
    assert seen.told["experts_backward"] == {(True, True)} and seen.told["selected_logprob_backward"] == {(True,)}
    assert (False, True) in seen.told["linear_backward"] and all(torch.equal(every[name], got[name]) for name in got)


@pytest.mark.parametrize("through", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize("grid", ["", "mxfp8"])
@pytest.mark.parametrize("learn", [(True, True), (True, False), (False, True), (False, False)])
def test_one_of_the_experts_matrices_may_be_frozen(
    learn: tuple[bool, bool], grid: str, through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "OPERATORS_ON_CPU", through)
    torch.manual_seed(1)
    x, gates, up, down = grown(40, 32), grown(40, 2), grown(6, 64, 32), grown(6, 32, 32)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(40)])
    every = torch.autograd.grad(operators.experts(x, gates, chosen, up, down, True, grid).sum(), (x, gates, up, down))
    leaves = (x, gates, *(w for w, learns in zip((up, down), learn, strict=True) if learns))
    frozen = [w if learns else w.detach() for w, learns in zip((up, down), learn, strict=True)]
    out = operators.experts(x, gates, chosen, frozen[0], frozen[1], True, grid)
    with FlopCounterMode(display=False) as counter:
        got = torch.autograd.grad(out.sum(), leaves)
    want = [*every[:2], *(each for each, learns in zip(every[2:], learn, strict=True) if learns)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    if not through:  # an operator hides its products
        share = 1 + (2 * learn[0] + learn[1]) / 3  # gate_up has twice the elements of down
        backward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            operators.experts(x.detach(), gates.detach(), chosen, up.detach(), down.detach(), True, grid)
        assert backward == pytest.approx(share * counter.get_total_flops())
