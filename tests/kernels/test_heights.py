"""A product is computed in the numbers of rows that agree, whatever numbers these are."""

import msgspec
import pytest
import torch

from headrace.kernels import batch_invariant, expert_mlp, heights
from headrace.kernels.heights import Heights, RowsDiffer
from headrace.messages.rollout import Span
from headrace.policy.config import Dtype
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.policy.scoring import score
from tests.support import other_blas, tiny
from tests.support.other_blas import fresh
from tests.training.test_device import POLICIES

__all__ = ["fresh"]

CUT = Heights((32, 64, 256), False, b"")


def test_rows_are_cut_into_heights_that_agree() -> None:
    assert [CUT.pieces(rows) for rows in (0, 1, 32, 33, 64, 70, 256, 600)] == [
        [], [32], [32], [64], [64], [64, 32], [256], [256, 256, 64, 32]
    ]  # fmt: skip
    whole = Heights((4,), True, b"")
    assert [whole.pieces(rows) for rows in (0, 1, 4, 701)] == [[0], [4], [4], [704]]
    assert heights.common(CUT, whole, 3) == 32 and heights.common(CUT, CUT, 65) == 256
    assert heights.common(whole, Heights((16,), True, b""), 17) == 32
    with pytest.raises(RowsDiffer):
        heights.common(CUT, whole, 257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_search_finds_where_a_library_changes_its_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    plain = heights.agreeing(heights.linear, 64, 96, dtype)
    heights._found.cache_clear()
    other_blas.install(monkeypatch)
    for product in (heights.linear, heights.scores, heights.shares):
        agreed = heights.agreeing(product, 64, 96, dtype)
        assert (agreed.tiles, agreed.whole) == ((32, 64, 128, 256, 512, 1024), False)
    assert plain.whole and heights.agreeing(heights.linear, 64, 96, dtype).digest == plain.digest


def test_one_height_is_enough(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Where no two heights agree, products are cut into tiles of the largest that suits a single token."""
    real = torch.mm

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return real(x, weight).add_(len(x) * 1e-3)

    monkeypatch.setattr(torch, "mm", own)
    agreed = heights.agreeing(heights.linear, 48, 40, torch.float32)
    assert (agreed.tiles, agreed.whole) == ((64,), False)


def test_a_single_member_of_a_batched_product_counts(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen counts the rows of all members: a single one of few rows may take its loop for small products."""
    real = torch.bmm

    def small(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = real(x, y)
        return torch.nextafter(out, out + 1) if x.shape[0] * x.shape[1] < 8 else out

    monkeypatch.setattr(torch, "bmm", small)
    agreed = heights.agreeing(heights.scores, 48, 64, torch.float32)
    assert agreed.whole and agreed.tiles == (8,)


def test_pieces_have_the_gradients_of_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heights, "agreeing", lambda *_: CUT)
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((301, 24), (20, 24)))
    grad = torch.randn(301, 20)
    got = torch.autograd.grad(batch_invariant.linear(x, weight, True), (x, weight), grad)
    want = torch.autograd.grad(torch.nn.functional.linear(x, weight), (x, weight), grad)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("even", "bfloat16"),
        pytest.param("odd", "float32", marks=pytest.mark.slow),
        pytest.param("latent", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_policy_has_one_arithmetic_where_the_library_has_several(
    name: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    seen = other_blas.install(monkeypatch)
    config = tiny.SHAPES[name](dtype) if name in tiny.SHAPES else msgspec.structs.replace(POLICIES[name], dtype=dtype)
    numerics = probe(config)
    assert numerics.exact, numerics.reason
    model = Model(config, numerics, seed=1)
    seen.clear()
    ids, targets = tiny.tokens(config, 700), range(1, 700)
    packed = score({0: model}, ids, [Span(0, 700, 0)], targets, 0.7)
    with torch.no_grad():
        trained, _ = model.selected_logprobs(model(ids, [700])[:-1], ids[1:], 0.7)
    assert torch.equal(packed, trained)
    steps = [Span(0, 600, 0), *(Span(at, at + 1, 0) for at in range(600, 620)), Span(620, 700, 0)]
    assert torch.equal(score({0: model}, ids, steps, targets, 0.7), packed)
    assert seen <= {32, 64, 128, 256, 512, 1024}


def test_parts_of_experts_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heights, "agreeing", lambda *_: CUT)
    seen = other_blas.install(monkeypatch)
    x, gates = torch.randn(130, 16), torch.ones(130, 1)
    chosen = (torch.arange(130) >= 100).long()[:, None]
    up, down = torch.randn(2, 24, 16), torch.randn(2, 16, 12)
    out = expert_mlp.expert_mlp(x, gates, chosen, up, down, True)
    assert seen == {32, 64}
    torch.testing.assert_close(out[:1], batch_invariant.swiglu(x[:1] @ up[0].T) @ down[0].T)
