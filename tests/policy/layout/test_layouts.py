"""The trainer's side of exact mode: padded, packed, in any micro-batch, computed again, on one thread or two."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.policy.config import Dtype
from headrace.policy.model import Layer, Model
from headrace.policy.numerics_probe import probe
from tests.policy.test_families import latent, made
from tests.support import tiny
from tests.support.paths import ROOT

LENGTHS = [70, 3, 130, 64]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
MODELS: dict[str, Callable[[Dtype], Model]] = {
    "qwen": lambda dtype: tiny.model(tiny.config(dtype)),
    "deepseek": lambda dtype: made(latent(dtype)),
}


def scored(model: Model, ids: Tensor, lengths: list[int]) -> Tensor:
    return model.selected_logprobs(model(ids, lengths), ids.roll(1), 0.8)[0]


def gradients(model: Model, ids: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.autograd.backward((scored(model, ids, LENGTHS) * torch.linspace(-1, 1, len(ids))).sum())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_padding_and_micro_batches_do_not_show(kind: str, dtype: Dtype) -> None:
    model = MODELS[kind](dtype)
    ids = tiny.tokens(model.config, sum(LENGTHS))
    packed = torch.split(model(ids, LENGTHS).detach(), LENGTHS)
    parts = torch.split(ids, LENGTHS)
    width = max(LENGTHS) + 57
    junk = tiny.tokens(model.config, width, seed=8)
    square = torch.cat([torch.cat((part, junk[: width - len(part)])) for part in parts])
    padded = torch.split(model(square, [width] * len(parts)).detach(), width)
    alone = [model(part, [len(part)]).detach() for part in parts]
    pairs = [*torch.split(model(torch.cat(parts[:2]), LENGTHS[:2]).detach(), LENGTHS[:2])]
    pairs += torch.split(model(torch.cat(parts[2:]), LENGTHS[2:]).detach(), LENGTHS[2:])
    for want, wide, single, pair in zip(packed, padded, alone, pairs, strict=True):
        assert torch.equal(wide[: len(want)], want) and torch.equal(single, want) and torch.equal(pair, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_activations_computed_again_change_no_bit(kind: str, dtype: Dtype) -> None:
    model = MODELS[kind](dtype)
    ids = tiny.tokens(model.config, sum(LENGTHS))
    before, first_gradients = scored(model, ids, LENGTHS).detach(), gradients(model, ids)
    model.recompute = True
    assert torch.equal(scored(model, ids, LENGTHS).detach(), before)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, ids), first_gradients, strict=True))


def test_activations_are_computed_again_with_the_routes_of_the_first_time() -> None:
    """Also where there was no record: the router that changed in between is not asked a second time."""
    model = tiny.model(tiny.config())
    model.recompute = True
    ids = tiny.tokens(model.config, 60)
    seen: list[Tensor] = []
    layer = model.layers[1]
    assert isinstance(layer, Layer)
    real = layer.function

    def spy(x: Tensor, gates: Tensor, experts: Tensor, *rest: object) -> Tensor:
        seen.append(experts)
        return real(x, gates, experts, *rest)  # type: ignore[arg-type]

    layer.function = spy
    recorder: list[Tensor] = []
    replay = torch.full((60, 2, 2), -1)
    replay[:20] = torch.tensor([3, 5])
    loss = model(ids, [60], routed=replay, recorder=recorder).sum()
    with torch.no_grad():
        router = layer.router
        router.neg_()
    torch.autograd.backward(loss)
    assert len(seen) == 2 and torch.equal(seen[0], seen[1]) and torch.equal(recorder[1], seen[0])
    assert (seen[0][:20] == torch.tensor([3, 5])).all() and not (seen[0][20:] == torch.tensor([3, 5])).all()
    assert router.grad is not None and float(router.grad.abs().max()) > 0.0


def threads() -> None:
    """Run as a program of its own: see the test."""
    for kind in MODELS:
        for dtype in DTYPES:
            torch.set_num_threads(1)
            model = MODELS[kind](dtype)
            ids = tiny.tokens(model.config, sum(LENGTHS))
            want, slopes = scored(model, ids, LENGTHS).detach(), gradients(model, ids)
            torch.set_num_threads(2)
            numerics = probe(model.config)
            assert numerics.exact and numerics.fingerprint == model.numerics.fingerprint
            assert torch.equal(scored(model, ids, LENGTHS).detach(), want)
            again, third = gradients(model, ids), gradients(model, ids)
            assert all(torch.equal(a, b) for a, b in zip(again, third, strict=True)), "gradients repeat"
            for a, b in zip(again, slopes, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2 if dtype == "bfloat16" else 1e-3, atol=1e-2)


@pytest.mark.slow
def test_two_threads_give_the_bits_of_one() -> None:
    """In a process whose threads sleep while they wait: spinning ones starve each other on a busy machine."""
    subprocess.run(
        [sys.executable, "-c", "from tests.policy.layout.test_layouts import threads; threads()"],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    )
