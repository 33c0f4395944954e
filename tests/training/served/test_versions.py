import copy

import msgspec
import pytest
import torch

from headrace.kernels import dispatch
from headrace.policy.model import Model
from headrace.policy.seam import PolicyModel
from headrace.training.served import versions as kept
from headrace.training.served.versions import Log, Versions, WeightChange, change, undo
from headrace.training.state import TrainerState
from tests.kernels.test_operators import Called
from tests.support.world import NUMERICS, POLICY

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
BF16 = msgspec.structs.replace(POLICY, dtype="bfloat16")


def same(one: PolicyModel, two: PolicyModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def noted(name: str, *entries: WeightChange | None) -> Log:
    log = Log()
    for entry in entries:
        log.note(name, entry)
    return log


def updated(state: TrainerState, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    state.apply(rate)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_earlier_versions_come_back_bit_for_bit(dtype: str) -> None:
    state = TrainerState(Model(msgspec.structs.replace(POLICY, dtype=dtype), NUMERICS, seed=1))
    state.log = Log()
    versions, copies = Versions(state.model, 0), {0: copy.deepcopy(state.model)}
    for version in range(1, 5):
        if version != 3:  # a refused step: the next version has the old bytes
            updated(state, 1e-3, version)
            updated(state, 1e-3, version + 100)  # a second minibatch
        versions.advance(version, state.log)
        state.log = Log()
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
    state.log = Log()
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
    assert isinstance(changed, WeightChange) and changed.positions is not None and changed.positions.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("piece", [7, 100, 2**20])
def test_an_entry_leads_back_to_every_bit_and_takes_a_position_and_an_element(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_PIECE", piece)
    generator = torch.Generator().manual_seed(1)
    before, other = (
        torch.randint(0, 256, (400 * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype).view(20, 20)
        for _ in range(2)
    )
    after = torch.where(
        torch.rand(20, 20, generator=generator) < 0.1, other.view(kind := BITS[dtype]), before.view(kind)
    )
    count = int((after != before.view(kind)).sum())
    entry = change(before, after.view(dtype))
    assert entry is not None and entry.positions is not None and len(entry.positions) == count > 20
    assert sum(tensor.nbytes for tensor in entry if tensor is not None) == count * (4 + dtype.itemsize)
    kept_after = after.clone()
    back = undo({"x": after.view(dtype)}, noted("x", entry))["x"]
    assert back.dtype == dtype and torch.equal(back.view(kind), before.view(kind)) and torch.equal(after, kept_after)


@pytest.mark.parametrize("share", [0.24, 0.26])
@pytest.mark.parametrize("count", [1000, 2**17])
def test_a_tensor_that_changed_in_more_than_a_quarter_is_kept_whole(share: float, count: int) -> None:
    before = torch.zeros(count)
    after = before.clone()
    after[torch.randperm(count, generator=torch.Generator().manual_seed(2))[: int(share * count)]] = 1.0
    entry = change(before, after)
    assert entry is not None and (entry.positions is None) == (share > 0.25)
    assert torch.equal(undo({"x": after}, noted("x", entry))["x"], before)


def test_eight_byte_elements_are_kept_whole() -> None:
    before = torch.arange(50, dtype=torch.float64)
    assert change(before, before.clone()) is None
    after = before.clone()
    after[3] = -0.0
    entry = change(before, after)
    assert entry == WeightChange(None, before) and undo({"x": after}, noted("x", entry))["x"] is before


class Name(str):
    """A parameter's name that counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_log_of_many_writes_compares_no_entry_with_all_before_it() -> None:
    """With many minibatches and parameters a search through the log would take longer than the update."""
    names, whole = [Name(f"layers.{layer}.qkv") for layer in range(50)], torch.zeros(4)
    sparse = change(torch.tensor([0.0] * 8), torch.tensor([0.0] * 7 + [1.0]))
    assert sparse is not None and sparse.positions is not None
    log = Log()
    for minibatch in range(20):
        for name in names:
            log.note(name, WeightChange(None, whole) if minibatch == 3 else sparse)
    assert Name.compared <= 20 * len(names), Name.compared
    assert [entry.positions is None for name, entry in log.entries if name == names[7]] == [False] * 3 + [True]


def test_a_rebuilt_version_shares_what_did_not_change() -> None:
    """As with adapters, whose base is the same in every version."""
    model = Model(BF16, NUMERICS, seed=1)
    versions, before = Versions(model, 0), model.norm.detach().clone()
    with torch.no_grad():
        model.norm.add_(1.0)
    entry = change(before, model.norm.detach())
    assert entry is not None
    versions.advance(1, noted("norm", entry))
    old = versions[0]
    assert torch.equal(old.get_parameter("norm"), before) and not torch.equal(model.norm, before)
    assert old.get_parameter("embedding").data_ptr() == model.embedding.data_ptr()


def test_the_delta_operators_find_and_undo_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "OPERATORS_ON_CPU", True)
    state = TrainerState(Model(BF16, NUMERICS, seed=1))
    state.log = Log()
    versions, before = Versions(state.model, 0), copy.deepcopy(state.model)
    with Called() as called:
        updated(state, 1e-6, 1)
        versions.advance(1, state.log)
        assert same(versions[0], before)
    assert called.names == {"changes", "apply_changes"}


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
