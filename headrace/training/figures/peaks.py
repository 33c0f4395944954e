"""The peak of a device in dense bfloat16 operations per second: what MFU and HFU are shares of.

Boards of one chip differ: an H100 PCIe has fewer multiprocessors, an H100 NVL a lower power limit than the SXM board.
So whole names are matched, as CUDA reports them. A board that is not in the table, a MIG slice among them, has no known
peak, because a wrong one would look like a good or a bad trainer.
"""

import re

import torch

from headrace.config import Config
from headrace.policy.config import PolicyConfig

_A100 = "NVIDIA A100 Tensor Core GPU, data sheet 1758950, 2021: bfloat16 312 TFLOPS, PCIe and SXM alike"
_H100 = "NVIDIA H100 Tensor Core GPU, data sheet: bfloat16 with sparsity, twice the dense rate, SXM 1,979, NVL 1,671"
_H100_PCIE = "NVIDIA H100 Tensor Core GPU, data sheet of 2022: bfloat16 with sparsity, PCIe 1,513"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip, data sheet: bfloat16 990 TFLOPS dense, the chip of the H100 SXM"
_H200 = "NVIDIA H200 Tensor Core GPU, data sheet: bfloat16 with sparsity, SXM 1,979, NVL 1,671"
_B200 = "NVIDIA DGX B200, data sheet: 72 PFLOPS of FP8 with sparsity on 8 GPUs; bfloat16 dense is a quarter"
_GB200 = "NVIDIA GB200 NVL72, data sheet: bfloat16 360 PFLOPS with sparsity on 72 GPUs"

PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe", 312e12, _A100),
    (r"NVIDIA H100 PCIe", 756.5e12, _H100_PCIE),
    (r"NVIDIA H100 NVL", 835.5e12, _H100),
    (r"NVIDIA H100 \d+GB HBM3", 989.5e12, _H100),
    (r"NVIDIA GH200 \d+GB", 989.5e12, _GH200),
    (r"NVIDIA H200 NVL", 835.5e12, _H200),
    (r"NVIDIA H200", 989.5e12, _H200),
    (r"NVIDIA B200", 2250e12, _B200),
    (r"NVIDIA GB200", 2500e12, _GB200),
)
"""Pattern of a board's whole name, its peak, and the source of the peak."""


def board_peak(name: str) -> float:
    """Dense bfloat16 operations per second of a board by the name that CUDA reports; 0 where it is not known."""
    return next((peak for pattern, peak, _ in PEAKS if re.fullmatch(pattern, name)), 0.0)


def peak_flops(config: Config, policy: PolicyConfig, device: torch.device) -> float:
    """Operations per second of all the trainer's devices together; 0 where it is not known."""
    if config.trainer.peak_tflops:
        return config.trainer.peak_tflops * 1e12 * config.trainer.ranks
    if device.type != "cuda" or policy.dtype != "bfloat16":
        return 0.0
    return board_peak(torch.cuda.get_device_name(device)) * config.trainer.ranks


def why_unknown(config: Config, policy: PolicyConfig, device: torch.device) -> str:
    """Why the trainer's peak is not known and what to do; empty where it is known."""
    if peak_flops(config, policy, device):
        return ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    of = "" if policy.dtype == "bfloat16" else f" in {policy.dtype}"
    return (
        f"the peak of {name}{of} is not known, so MFU and HFU are left out: set [trainer] peak_tflops to the dense "
        "10^12 operations per second of one device"
    )
