"""The probe passes where exact mode holds, and refuses with the operation's name where a fault is planted."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import batch_invariant, block_attention, expert_mlp
from headrace.policy.numerics_probe import ISA, PADS, probe
from tests.support import tiny
from tests.support.paths import ROOT


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_exact_mode_is_found_here(shape: str) -> None:
    config = tiny.SHAPES[shape]("float32")
    numerics = probe(config)
    assert numerics.exact and numerics.row_pad in PADS and not numerics.reason
    assert numerics == probe(config)
    assert f"exact{numerics.row_pad}" in numerics.fingerprint


def test_ordinary_mode_is_a_choice_with_its_own_fingerprint() -> None:
    config = tiny.config()
    numerics = probe(config, exact=False)
    assert (numerics.exact, numerics.row_pad, numerics.reason) == (False, 1, "not asked for")
    assert len({numerics.fingerprint, probe(config).fingerprint, probe(tiny.config("bfloat16")).fingerprint}) == 3


def test_a_product_without_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def small_kernel(x: torch.Tensor, weight: torch.Tensor, pad: int) -> torch.Tensor:
        out = F.linear(x, weight)
        return torch.nextafter(out, out + 1) if len(x) < 4 else out

    monkeypatch.setattr(batch_invariant, "linear", small_kernel)
    numerics = probe(tiny.config())
    assert not numerics.exact and numerics.row_pad == 1
    assert "rows of a matrix product depend on their number even when padded to 32" in numerics.reason


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


@pytest.mark.parametrize(("given", "seen"), [("", "SSE4.1"), pytest.param("AVX", "AVX", marks=pytest.mark.slow)])
def test_the_probe_limits_what_onednn_uses_for_sixteen_bits_before_its_first_product(given: str, seen: str) -> None:
    """With SSE4.1 in place of the limit, which every processor has: oneDNN itself prints what it uses."""
    code = """
import torch
from headrace.policy import numerics_probe
from tests.support import tiny
numerics_probe.WITHOUT_TILES = "SSE41"
numerics_probe.probe(tiny.config("bfloat16"))
torch.mkldnn_max_pool2d(torch.randn(1, 8, 4, 4).to_mkldnn(), 2)
"""
    env = {**os.environ, "ONEDNN_VERBOSE": "1", "OMP_NUM_THREADS": "1"} | ({ISA: given} if given else {})
    if not given:
        env.pop(ISA, None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT, check=True)
    assert re.search(r"cpu,isa:.*", done.stdout + done.stderr)[0].endswith(seen)  # type: ignore[index]


def test_other_arithmetic_keeps_all_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA, raising=False)
    probe(tiny.config())
    probe(tiny.config("bfloat16"), exact=False)
    assert ISA not in os.environ
