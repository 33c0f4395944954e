"""The device that a trainer computes on, and whether its memory is large enough."""

import torch

from headrace import machine_memory
from headrace.config import Config
from headrace.policy.config import PolicyConfig
from headrace.training import memory_plan


class TrainerError(Exception):
    """The trainer cannot start, or cannot take a step, as configured; the text says what is wrong."""


def device_named(name: str) -> torch.device:
    """The device of `[trainer] device`. TrainerError when this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainerError(f"[trainer] device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= count:
        raise TrainerError(
            f"[trainer] device: this machine has no {name}; it has {torch.cuda.device_count()} CUDA devices"
        )
    return device


def available_bytes(device: torch.device) -> int:
    """Free bytes of a device; for the CPU, the kernel's estimate of the memory that is available without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if (free := machine_memory.available_bytes()) is not None:
        return free
    raise TrainerError("expected a line MemAvailable in /proc/meminfo, there is none; a Linux kernel >= 3.14 is needed")


def check_memory(config: Config, policy: PolicyConfig, available: int) -> None:
    """TrainerError when the memory plan of this trainer is larger than the available bytes."""
    needed = memory_plan.plan(policy, memory_plan.layout_of(config))
    if needed.total > available:
        raise TrainerError(
            f"the trainer needs {needed.total / memory_plan.GIB:.1f} GiB and its device has "
            f"{available / memory_plan.GIB:.1f} GiB free; `headrace trainer plan` shows the causes and what would fit"
        )
