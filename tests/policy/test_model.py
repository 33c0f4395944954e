"""One definition, two ways to run it: the bits must agree in exact mode, and only there."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.policy.cache import KVCache
from headrace.policy.config import CheckpointError, Dtype, PolicyConfig
from headrace.policy.model import Model
from tests.support import tiny

Changes = Mapping[str, Any]
LENGTHS = [5, 130, 64, 65, 140, 1, 77]
CASES = [(shape, dtype) for shape in tiny.SHAPES for dtype in ("float32", "bfloat16")]


def decoded(model: Model, sequences: list[Tensor], *, first: int, chunk: int) -> list[Tensor]:
    """Hidden states of all positions, as a sampler computes them: `first` tokens in chunks, then one by one."""
    blocks = 4
    cache = KVCache(model.config, len(sequences) * blocks)
    tables = [list(range(i * blocks, (i + 1) * blocks))[::-1] for i in range(len(sequences))]
    done = [0] * len(sequences)
    out: list[list[Tensor]] = [[] for _ in sequences]
    while live := [i for i, s in enumerate(sequences) if done[i] < len(s)]:
        sizes = [min(chunk, first - done[i], len(sequences[i]) - done[i]) if done[i] < first else 1 for i in live]
        new = torch.cat([sequences[i][done[i] : done[i] + n] for i, n in zip(live, sizes, strict=True)])
        hidden = model.forward_cached(new, sizes, [done[i] for i in live], [tables[i] for i in live], cache)
        for i, part in zip(live, torch.split(hidden, sizes), strict=True):
            out[i].append(part)
            done[i] += len(part)
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_packed_and_cached_forward_have_the_same_bits(shape: str, dtype: Dtype, batch: int) -> None:
    config = tiny.SHAPES[shape](dtype)
    model = tiny.model(config)
    lengths = LENGTHS[-batch:] if batch > 1 else [140]
    ids = tiny.tokens(config, sum(lengths))
    hidden = model(ids, lengths)
    assert hidden.requires_grad
    whole = torch.split(hidden.detach(), lengths)
    for got, want in zip(decoded(model, list(torch.split(ids, lengths)), first=90, chunk=37), whole, strict=True):
        assert torch.equal(got, want)


def test_the_ordinary_way_does_not() -> None:
    """In float32: bfloat16 rounds so coarsely that a tiny model may come out equal by luck."""
    config = tiny.config()
    model = tiny.model(config, exact=False)
    ids = tiny.tokens(config, sum(LENGTHS))
    whole = torch.split(model(ids, LENGTHS).detach(), LENGTHS)
    got = decoded(model, list(torch.split(ids, LENGTHS)), first=40, chunk=40)
    assert not all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
    assert max((a - b).abs().max() for a, b in zip(got, whole, strict=True)) < 1e-4


def test_a_sequence_does_not_see_its_neighbours() -> None:
    model = tiny.model(tiny.odd())
    ids = tiny.tokens(model.config, sum(LENGTHS))
    whole = torch.split(model(ids, LENGTHS), LENGTHS)
    for part, want in zip(torch.split(ids, LENGTHS), whole, strict=True):
        assert torch.equal(model(part, [len(part)]), want)


@pytest.mark.parametrize("changes", [{}, {"heads": 4, "kv_heads": 2}, {"experts": 0, "top_k": 0}, {"tied": True}])
def test_gradients_are_those_of_plain_torch(changes: Changes) -> None:
    config = tiny.config(**changes)
    ids = tiny.tokens(config, sum(LENGTHS))
    weight = torch.linspace(-1, 1, len(ids))
    exact, plain = tiny.model(config), tiny.model(config, exact=False)
    logp, _ = exact.selected_logprobs(exact(ids, LENGTHS), ids.flip(0), 0.7)
    torch.autograd.backward((logp * weight).sum())
    full = torch.log_softmax(plain.logits(plain(ids, LENGTHS)) / 0.7, -1)
    torch.autograd.backward((full.gather(1, ids.flip(0)[:, None])[:, 0] * weight).sum())
    for (name, a), b in zip(exact.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert float(b.grad.abs().max()) > 0.0, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=2e-5, msg=name)


def test_gradients_repeat_bit_for_bit() -> None:
    config = tiny.config()
    ids = tiny.tokens(config, sum(LENGTHS))

    def gradients() -> list[Tensor]:
        model = tiny.model(config)
        torch.autograd.backward(model.selected_logprobs(model(ids, LENGTHS), ids.flip(0))[0].sum())
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    first, second = gradients(), gradients()
    assert len(first) == len(list(tiny.model(config).parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_selected_logprobs_by_row_and_by_temperature() -> None:
    config = tiny.odd()
    model = tiny.model(config)
    hidden = model(tiny.tokens(config, 100), [100]).detach()
    targets = tiny.tokens(config, 100, seed=5)
    heat = torch.linspace(0.3, 2.0, 100)
    logp, entropy = model.selected_logprobs(hidden, targets, heat)
    for at in (0, 7, 99):
        one, h = model.selected_logprobs(hidden[at : at + 1], targets[at : at + 1], float(heat[at]))
        assert torch.equal(one[0], logp[at]) and torch.equal(h[0], entropy[at])
    full = torch.log_softmax(model.logits(hidden).double() / heat[:, None], -1)
    torch.testing.assert_close(logp.double(), full.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1), rtol=0, atol=1e-5)
    assert torch.equal(model.selected_logprobs(hidden, targets, 0.0)[0], model.selected_logprobs(hidden, targets)[0])


def test_more_tokens_than_a_chunk_of_the_head() -> None:
    """Chunks must show neither in the bits nor in the gradient."""
    model = tiny.model(tiny.config())
    hidden = torch.randn(2500, model.config.dim, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = tiny.tokens(model.config, 2500)
    logp, _ = model.selected_logprobs(hidden, targets)
    parts = [model.selected_logprobs(hidden[at : at + 313], targets[at : at + 313])[0] for at in range(0, 2500, 313)]
    assert torch.equal(logp, torch.cat(parts))
    (grad,) = torch.autograd.grad(logp.square().sum(), hidden)
    plain = torch.log_softmax(torch.nn.functional.linear(hidden, model.head_weight), -1).gather(1, targets[:, None])
    torch.testing.assert_close(grad, torch.autograd.grad(plain.square().sum(), hidden)[0], rtol=1e-4, atol=1e-4)


def test_lengths_must_add_up() -> None:
    model = tiny.model(tiny.config())
    with pytest.raises(ValueError, match="expected lengths that add up to 10 ids, got 9"):
        model(torch.zeros(10, dtype=torch.int64), [4, 5])


@pytest.mark.parametrize("changes", [{}, {"experts": 0, "top_k": 0}, {"tied": True}])
def test_state_goes_out_and_comes_back(changes: Changes) -> None:
    config = tiny.config(**changes)
    model, other = tiny.model(config), tiny.model(config, seed=2)
    state = model.state()
    other.load_state(state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    state["model.norm.weight"].zero_()
    assert float(model.norm.detach().abs().min()) > 0, "state must be a copy"


def test_state_that_does_not_fit_is_refused() -> None:
    model = tiny.model(tiny.config())
    state = model.state()
    gate = state.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    with pytest.raises(
        CheckpointError, match=r"^1 tensors are missing .* first is model\.layers\.1\.mlp\.experts\.3\.up_proj"
    ):
        model.load_state(state)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: expected shape \[64, 64\], got \[1, 64\]"):
        model.load_state(state | {"model.layers.1.mlp.experts.3.up_proj.weight": gate[:1]})


def test_same_seed_same_weights() -> None:
    config: PolicyConfig = tiny.config()
    one, same, other = (Model(config, tiny.numerics(config), seed=seed).state() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
