"""Published precision: rounded once, at the sender, to exactly what engines serve."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.weights import snapshot, tensor_state
from headrace.weights.publishing import precision
from headrace.weights.publishing.precision import BF16, MXFP8
from headrace.weights.state import WeightError


@pytest.fixture
def trained() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "model.embed_tokens.weight": torch.randn(40, 64, generator=generator),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.randn(96, 64, generator=generator) * 0.02,
        "model.layers.0.mlp.gate.weight": torch.randn(8, 64, generator=generator),
        "model.layers.0.input_layernorm.weight": torch.ones(64),
        "odd": torch.randn(5, 33, generator=generator),
        "ids": torch.arange(4),
    }


def test_scales_are_the_logarithm_rounded_up_and_nothing_saturates() -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((64, 128)) * np.exp2(rng.integers(-60, 60, (64, 1)))).astype(np.float32)
    elements, scales = precision.quantise(torch.from_numpy(values))
    assert (elements.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.uint8, (64, 4))
    for row in range(64):
        for block in range(4):
            most = float(np.abs(values[row, 32 * block : 32 * block + 32]).max())
            assert int(scales[row, block]) - 127 == math.ceil(math.log2(most / 448.0))
    back = precision.restore({"w": elements, "w_scale": scales})["w"].double()
    blocks, errors = (
        array.reshape(-1, 32) for array in (torch.from_numpy(values).double(), back - torch.from_numpy(values))
    )
    # Half a unit of three mantissa bits, or of the smallest denormal under the block's scale.
    unit = torch.exp2(scales.reshape(-1, 1).double() - 127)
    assert bool((errors.abs() <= torch.maximum(blocks.abs() * 2.0**-4, unit * 2.0**-10) * 1.0001).all())
    assert float(errors.norm() / blocks.norm()) < 0.03


def test_exact_powers_zeros_and_what_is_no_number() -> None:
    values = torch.zeros(6, 32)
    values[1, 3] = 448.0 * 2.0**-5
    values[2, 0] = float("nan")
    values[3, 0] = float("inf")
    values[4] = 3.0e38
    values[5] = -0.0
    elements, scales = precision.quantise(values)
    assert scales[:, 0].tolist()[:4] == [1, 122, 255, 255]
    back = precision.restore({"w": elements, "w_scale": scales})["w"]
    assert float(back[1, 3]) == 448.0 * 2.0**-5
    assert bool(back[2].isnan().all() and back[3].isnan().all())
    assert float(back[4, 0]) == pytest.approx(3.0e38, rel=0.07)
    assert bool(back[5].signbit().all()) and bool((back[5] == 0).all())


def test_what_is_published_is_what_is_served(tmp_path: Path, trained: dict[str, torch.Tensor]) -> None:
    tensor_state.write(tmp_path / "trained", trained)
    digest = precision.publish(tmp_path / "trained", tmp_path / "served", MXFP8)
    served = tensor_state.read(tmp_path / "served")
    assert digest == snapshot.file_hash(tmp_path / "served") == tensor_state.state_hash(served)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert {key for key, tensor in served.items() if tensor.dtype == torch.float8_e4m3fn} == {name}
    assert served[f"{name}_scale"].shape == (96, 2)
    assert all(served[key].dtype == torch.bfloat16 for key in ("model.embed_tokens.weight", "odd"))
    assert torch.equal(served["ids"], trained["ids"])
    back = precision.restore(served)
    assert set(back) == set(trained)
    again, scales = precision.quantise(back[name])
    assert torch.equal(precision.restore({"w": again, "w_scale": scales})["w"], back[name]), "served bytes are stable"
    precision.publish(tmp_path / "trained", tmp_path / "half", BF16)
    assert all(
        torch.equal(tensor, trained[key].bfloat16() if trained[key].is_floating_point() else trained[key])
        for key, tensor in tensor_state.read(tmp_path / "half").items()
    )


def test_an_unknown_precision_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="expected bf16 or mxfp8"):
        precision.publish(tmp_path / "a", tmp_path / "b", "int3")
