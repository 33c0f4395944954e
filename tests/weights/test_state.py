"""The state hash sees every bit, name, dtype and shape, and nothing else."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.messages.weights import TensorInfo
from headrace.weights import state, tensor_state


def test_sizes_are_those_of_the_tensors() -> None:
    assert {name: dtype.itemsize for name, dtype in tensor_state.DTYPES.items()} == state.SIZES


def _state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "b.weight": torch.randn(7, 5, generator=generator),
        "a.weight": torch.randn(33, generator=generator).bfloat16(),
        "scale": torch.randint(0, 255, (4, 4), generator=generator, dtype=torch.uint8),
    }


def test_equal_bits_hash_equal_whatever_the_order_and_the_strides() -> None:
    first = _state()
    second = {name: first[name].clone() for name in reversed(first)}
    second["b.weight"] = first["b.weight"].t().contiguous().t()
    assert not second["b.weight"].is_contiguous()
    assert tensor_state.state_hash(first) == tensor_state.state_hash(second)
    assert len(tensor_state.state_hash(first)) == 32


@pytest.mark.parametrize("change", ["bit", "sign_of_zero", "nan_payload", "name", "dtype", "shape", "missing"])
def test_every_change_shows(change: str) -> None:
    tensors = _state()
    tensors["b.weight"][0, 0] = 0.0
    tensors["b.weight"][0, 1] = math.nan
    before = tensor_state.state_hash(tensors)
    if change == "bit":
        tensors["a.weight"].view(torch.int16)[32] ^= 1
    elif change == "sign_of_zero":
        tensors["b.weight"][0, 0] = -0.0
    elif change == "nan_payload":
        tensors["b.weight"].view(torch.int32)[0, 1] ^= 1
    elif change == "name":
        tensors["c.weight"] = tensors.pop("b.weight")
    elif change == "dtype":
        tensors["scale"] = tensors["scale"].view(torch.int8)
    elif change == "shape":
        tensors["b.weight"] = tensors["b.weight"].reshape(5, 7)
    else:
        del tensors["scale"]
    assert tensor_state.state_hash(tensors) != before


def test_blocks_cover_a_tensor_and_never_exceed_the_limit() -> None:
    info = TensorInfo("w", "BF16", (3, state.BLOCK))
    parts = list(state.blocks(info))
    assert [start for start, _ in parts] == [0, state.BLOCK, 2 * state.BLOCK]
    assert sum(count for _, count in parts) == state.elements(info)
    assert list(state.blocks(TensorInfo("w", "F32", (0, 4)))) == []
    assert list(state.blocks(TensorInfo("w", "F64", ()))) == [(0, 2)]
    for shape in ((3, state.BLOCK), (state.BLOCK + 1,), (1,), (0, 4), ()):
        info = TensorInfo("w", "F64", shape)
        assert state.block_count(info) == len(list(state.blocks(info)))


def test_units_hold_every_block_once_of_one_dtype_and_never_more_than_a_block() -> None:
    tensors = [
        TensorInfo("a", "BF16", (3, state.BLOCK // 2)),
        TensorInfo("b", "F32", (10,)),
        TensorInfo("c", "BF16", (100,)),
        TensorInfo("d", "BF16", (0,)),
        TensorInfo("e", "F32", (7, 3)),
        TensorInfo("f", "BF16", (state.BLOCK,)),
    ]
    units = state.units(tensors)
    parts = [part for unit in units for part in unit]
    assert sorted(part.block for part in parts) == list(range(6))
    for unit in units:
        assert len({tensors[part.tensor].dtype for part in unit}) == 1
        assert sum(part.items for part in unit) <= state.BLOCK
    assert [[part.block for part in unit] for unit in units] == [[0], [1, 3], [5], [2, 4]]
    hashes = bytes(range(96))
    assert len({state.unit_hash(unit, hashes) for unit in units}) == 4


@pytest.mark.parametrize("dtype", list(tensor_state.DTYPES))
def test_bits_share_memory_for_every_dtype(dtype: str) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    typed = tensor.view(tensor_state.DTYPES[dtype])
    view = tensor_state.bits(typed)
    assert view.dtype.kind == "u"
    tensor[0] = 1
    assert view[0] == 1
    assert np.count_nonzero(view) == 1


def test_a_dtype_that_is_not_published_is_refused_by_name() -> None:
    with pytest.raises(state.WeightError, match="phase"):
        tensor_state.state_hash({"phase": torch.zeros(2, dtype=torch.complex64)})
