import copy

import msgspec
import pytest
import torch

from headrace.policy.model import Model
from headrace.training.served.versions import Change, Versions, change
from headrace.training.state import TrainerState
from tests.support.world import NUMERICS, POLICY

BF16 = msgspec.structs.replace(POLICY, dtype="bfloat16")


def same(one: Model, two: Model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def updated(state: TrainerState, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    state.apply(rate)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_earlier_versions_come_back_bit_for_bit(dtype: str) -> None:
    state = TrainerState(Model(msgspec.structs.replace(POLICY, dtype=dtype), NUMERICS, seed=1))
    state.log = []
    versions, copies = Versions(state.model, 0), {0: copy.deepcopy(state.model)}
    for version in range(1, 5):
        if version != 3:  # a refused step: the next version has the old bytes
            updated(state, 1e-3, version)
            updated(state, 1e-3, version + 100)  # a second minibatch
        versions.advance(version, state.log)
        state.log = []
        copies[version] = copy.deepcopy(state.model)
    assert list(versions) == [0, 1, 2, 3, 4] and versions[4] is state.model
    for version in (1, 0, 3, 2, 4):
        assert same(versions[version], copies[version]), version
    assert not same(versions[1], versions[2]) and same(versions[2], versions[3])
    assert len(versions.keep(2)) == 2
    assert versions.earlier == [2, 3] and same(versions[2], copies[2])
    with pytest.raises(KeyError):
        versions[1]


def test_a_small_update_of_bfloat16_keeps_a_fraction_of_the_model() -> None:
    state = TrainerState(Model(BF16, NUMERICS, seed=1))
    state.log = []
    versions = Versions(state.model, 0)
    updated(state, 1e-6, 1)
    versions.advance(1, state.log)
    size = sum(parameter.nbytes for parameter in state.model.parameters())
    assert 0 < versions.nbytes < 0.1 * size, (versions.nbytes, size)


def test_bits_are_compared_not_values() -> None:
    before = torch.tensor([0.0, 1.0, float("nan"), 2.0, 0.0, 0.0, 0.0, 0.0])
    after = before.clone()
    assert change(before, after) is None, "a NaN equals itself"
    after[0] = -0.0
    changed = change(before, after)
    assert isinstance(changed, Change) and changed.positions is not None and changed.positions.tolist() == [0]


def test_gradients_of_bfloat16_add_up_in_float32() -> None:
    """Sixteen micro-batches whose sum bfloat16 cannot hold: 1 and fifteen times 2^-9."""
    state = TrainerState(Model(BF16, NUMERICS, seed=1))
    for value in (1.0, *[2.0**-9] * 15):
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        state.collect_gradients()
    for name, gradient in state.gradients():
        assert gradient.dtype == torch.float32, name
        assert torch.equal(gradient, torch.full_like(gradient, 1.0 + 15 * 2.0**-9)), name
