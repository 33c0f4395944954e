"""Routes recorded by a sampler are replayed; scores are not."""

import pytest
import torch

from headrace.messages.base import Array
from headrace.policy import moe
from headrace.policy.model import Layer, Model
from tests.support import tiny


def recorded(model: Model, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    model(ids, lengths, recorder=rows)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
def test_replaying_what_was_routed_changes_nothing(dtype: torch.dtype) -> None:
    model = tiny.model(tiny.config())
    ids = tiny.tokens(model.config, 150)
    routes = recorded(model, ids, [100, 50])
    assert routes.shape == (150, 2, 2) and len(set(routes.flatten().tolist())) == 8
    again: list[torch.Tensor] = []
    replayed = model(ids, [100, 50], routed=routes.to(dtype), recorder=again)
    assert torch.equal(replayed, model(ids, [100, 50]))
    assert torch.equal(torch.stack(again, 1), routes)


def test_forced_routes_are_taken_and_move_the_router() -> None:
    model = tiny.model(tiny.config())
    ids = tiny.tokens(model.config, 60)
    forced = (recorded(model, ids, [60]) + 3) % 8
    rows: list[torch.Tensor] = []
    out = model(ids, [60], routed=forced, recorder=rows)
    assert torch.equal(torch.stack(rows, 1), forced)
    assert not torch.equal(out, model(ids, [60]))
    out.square().sum().backward()
    layer = model.layers[0]
    assert isinstance(layer, Layer) and layer.router.grad is not None and float(layer.router.grad.abs().max()) > 0


def test_the_gradient_is_that_of_gather_and_renormalise() -> None:
    generator = torch.Generator().manual_seed(2)
    x, router, gate_up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()
        for shape in ((40, 12), (5, 12), (5, 16, 12), (5, 12, 8))
    )
    replay = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(40)])
    out, _ = moe.mixture(x, moe.Mixture(router, gate_up, down, 2, True), True, replay)
    got = torch.autograd.grad(out.square().sum(), (x, router, gate_up, down))

    gates = torch.softmax(x @ router.T, -1).gather(1, replay)
    gates = gates / gates.sum(-1, keepdim=True)
    every = torch.einsum("nd,eid->nei", x, gate_up)
    inner = torch.nn.functional.silu(every[..., :8]) * every[..., 8:]
    outer = torch.einsum("nei,edi->ned", inner, down)
    plain = (outer.gather(1, replay[..., None].expand(-1, -1, 12)) * gates[..., None]).sum(1)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)
    for a, b in zip(got, torch.autograd.grad(plain.square().sum(), (x, router, gate_up, down)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)


def test_rows_without_a_record_route_live() -> None:
    model = tiny.model(tiny.config())
    ids = tiny.tokens(model.config, 30)
    live = recorded(model, ids, [30])
    routes = live.to(torch.uint8)
    routes[10:20] = 255
    rows: list[torch.Tensor] = []
    out = model(ids, [30], routed=routes, recorder=rows)
    assert torch.equal(torch.stack(rows, 1), live) and torch.equal(out, model(ids, [30]))
    assert (moe.widen(routes, 2, 2)[10:20] == -1).all()


def test_the_largest_expert_of_routes_and_half_a_record() -> None:
    for dtype, none in ((torch.uint8, 255), (torch.uint16, 65535), (torch.int64, -1)):
        routes = torch.tensor([[[3, 1], [0, 7]], [[none, none], [2, 2]]]).to(dtype)
        assert moe.largest(routes) == 7 and moe.largest(routes[:0]) == -1 and moe.largest(routes[1:, :1]) == -1
        assert moe.largest(routes[:1]) == 7
        with pytest.raises(moe.RoutesMissing, match=rf"the experts \[3, {none}\] of a token"):
            moe.largest(torch.tensor([[[3, none], [0, 7]]]).to(dtype))
    with pytest.raises(moe.RoutesMissing, match=r"the experts \[3, -2\] of a token"):
        moe.largest(torch.tensor([[[3, -2], [0, 7]]]))


def test_a_missing_or_misshapen_record_is_an_error() -> None:
    with pytest.raises(moe.RoutesMissing, match="carries no routed experts"):
        moe.from_array(None, 2, 2)
    with pytest.raises(moe.RoutesMissing, match=r"shape \[3, 2, 1\] do not fit 2 layers and top 2"):
        moe.from_array(Array.of([0] * 6, "|u1", (3, 2, 1)), 2, 2)
    with pytest.raises(moe.RoutesMissing, match="got <i4"):
        moe.from_array(Array.of([0] * 4, "<i4", (1, 2, 2)), 2, 2)


@pytest.mark.parametrize(("dtype", "none"), [("|u1", 255), ("<u2", 65535)])
def test_arrays_widen_with_their_sentinel(dtype: str, none: int) -> None:
    wide = moe.from_array(Array.of([3, 1, none, none], dtype, (2, 1, 2)), 1, 2)
    assert wide.dtype == torch.int64 and wide.tolist() == [[[3, 1]], [[-1, -1]]]
    assert len(moe.from_array(Array.of([], dtype, (0, 1, 2)), 1, 2)) == 0


def test_experts_without_tokens_are_fine() -> None:
    """One token among eight experts, and gradients that reach the two it used."""
    model = tiny.model(tiny.config())
    ids = tiny.tokens(model.config, 1)
    used = set(recorded(model, ids, [1])[0, 0].tolist())
    model(ids, [1]).sum().backward()
    layer = model.layers[0]
    assert isinstance(layer, Layer) and layer.gate_up.grad is not None
    assert {e for e in range(8) if float(layer.gate_up.grad[e].abs().max()) > 0} == used
