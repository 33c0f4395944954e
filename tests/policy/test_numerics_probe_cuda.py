"""The probe on a GPU: exact mode holds, its fingerprint names the device, and a planted fault is named."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import operators
from headrace.policy.config import Dtype
from headrace.policy.numerics_probe import probe
from headrace.policy.probing import on_device
from tests.support import tiny
from tests.training.test_device import POLICIES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["even", "odd", *POLICIES])
def test_exact_mode_is_found_on_a_gpu(name: str, dtype: Dtype) -> None:
    config = tiny.SHAPES[name](dtype) if name in tiny.SHAPES else msgspec.structs.replace(POLICIES[name], dtype=dtype)
    numerics = probe(config, device="cuda")
    assert numerics.exact, numerics.reason
    assert numerics == probe(config, device="cuda", seed=1)
    assert numerics.fingerprint.startswith("cuda-") and "-exact-" in numerics.fingerprint
    ordinary = probe(config, exact=False, device="cuda")
    assert (ordinary.exact, ordinary.reason) == (False, "not asked for")
    assert len({numerics.fingerprint, ordinary.fingerprint, probe(config).fingerprint}) == 3
    print(numerics.fingerprint)


def test_a_product_that_splits_the_reduction_of_few_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do with few rows, though not in every shape."""
    config = tiny.config("bfloat16", dim=2048, expert_dim=512)

    def library(x: torch.Tensor, weight: torch.Tensor, _: bool) -> torch.Tensor:
        half = x.shape[1] // 2 if len(x) <= 64 else 0
        x32, weight32 = x.float(), weight.float()
        return (F.linear(x32[:, :half], weight32[:, :half]) + F.linear(x32[:, half:], weight32[:, half:])).to(x.dtype)

    monkeypatch.setattr(operators, "linear", library)
    generator = torch.Generator().manual_seed(0)
    assert on_device.failure(config, generator, torch.device("cuda")).startswith("a product from ")
