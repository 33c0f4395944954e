"""The peak of a board: by its whole name, and none for a board that is not known."""

import msgspec
import pytest
import torch

from headrace.config import Mesh, Trainer
from headrace.training.figures.peaks import board_peak, peak_flops, why_unknown
from tests.support.world import CONFIG, POLICY

BOARDS = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.5,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
}
UNKNOWN = ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20", "NVIDIA A10", "NVIDIA GeForce RTX 4090", "NVIDIA B2000")


@pytest.mark.parametrize(("name", "tflops"), BOARDS.items())
def test_boards_of_one_chip_have_peaks_of_their_own(name: str, tflops: float) -> None:
    assert board_peak(name) == tflops * 1e12


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_board_that_is_not_known_has_no_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    policy = msgspec.structs.replace(POLICY, dtype="bfloat16")
    assert board_peak(name) == peak_flops(CONFIG, policy, torch.device("cuda")) == 0.0
    why = why_unknown(CONFIG, policy, torch.device("cuda"))
    assert f"the peak of {name} is not known" in why and "[trainer] peak_tflops" in why


def test_the_configured_peak_counts_for_every_process() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(CONFIG, POLICY, cpu) == 0.0
    assert why_unknown(CONFIG, POLICY, cpu).startswith("the peak of cpu")
    told = msgspec.structs.replace(CONFIG, trainer=Trainer(peak_tflops=1.0, mesh=Mesh(shard=2)))
    assert (peak_flops(told, POLICY, cpu), why_unknown(told, POLICY, cpu)) == (2e12, "")
