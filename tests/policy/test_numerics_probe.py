"""The probe passes where exact mode holds, and refuses with the operation's name where a fault is planted."""

import pytest
import torch

from headrace.kernels import batch_invariant, block_attention, expert_mlp
from headrace.policy.numerics_probe import probe
from tests.support import tiny
from tests.support.other_blas import fresh

__all__ = ["fresh"]


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_exact_mode_is_found_here(shape: str) -> None:
    config = tiny.SHAPES[shape]("float32")
    numerics = probe(config)
    assert numerics.exact and not numerics.reason
    assert numerics == probe(config)
    assert "-exact-" in numerics.fingerprint


def test_ordinary_mode_is_a_choice_with_its_own_fingerprint() -> None:
    config = tiny.config()
    numerics = probe(config, exact=False)
    assert (numerics.exact, numerics.reason) == (False, "not asked for")
    assert len({numerics.fingerprint, probe(config).fingerprint, probe(tiny.config("bfloat16")).fingerprint}) == 3


def test_a_product_whose_rows_depend_on_their_place_is_refused(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    real = torch.mm

    def placed(x: torch.Tensor, weight: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        out = real(x, weight, **more)
        out[1::2] = torch.nextafter(out[1::2], out[1::2] + 1)
        return out

    monkeypatch.setattr(torch, "mm", placed)
    numerics = probe(tiny.config())
    assert not numerics.exact and "depend on their place" in numerics.reason and "in float32" in numerics.reason


def test_a_scalar_tail_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's float32 silu does: the last elements of a buffer, short of a vector, are rounded otherwise."""
    real = batch_invariant.swiglu

    def fused(gate_up: torch.Tensor) -> torch.Tensor:
        flat = real(gate_up).reshape(-1)
        tail = flat[len(flat) // 64 * 64 :]
        tail.copy_(torch.nextafter(tail, tail + 1))
        return flat.view(len(gate_up), -1)

    monkeypatch.setattr(batch_invariant, "swiglu", fused)
    numerics = probe(tiny.odd())
    assert not numerics.exact and numerics.reason.startswith("swiglu of ")


def test_attention_of_another_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = block_attention.cached_attention

    def nudged(*args: object) -> torch.Tensor:
        out = real(*args)  # type: ignore[arg-type]
        return torch.nextafter(out, out + 1) if out.shape[1] == 1 else out

    monkeypatch.setattr(block_attention, "cached_attention", nudged)
    numerics = probe(tiny.config())
    assert not numerics.exact and numerics.reason.startswith("attention of 1 new tokens over a cache")
    assert "ordinary" in numerics.fingerprint


def test_a_sum_over_experts_that_depends_on_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expert_mlp.expert_mlp

    def nudged(*args: object) -> torch.Tensor:
        out = real(*args)  # type: ignore[arg-type]
        return torch.nextafter(out, out + 1) if len(out) == 7 else out

    monkeypatch.setattr(expert_mlp, "expert_mlp", nudged)
    numerics = probe(tiny.config())
    assert not numerics.exact and numerics.reason == "experts of 7 tokens differ from the same tokens among 500"


def test_the_probe_takes_no_state_from_torch() -> None:
    """Trainer and sampler probe at different moments: neither seeds nor grad mode may show in a fingerprint."""
    before = torch.get_rng_state()
    first = probe(tiny.config())
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    with torch.inference_mode():
        assert probe(tiny.config()) == first
