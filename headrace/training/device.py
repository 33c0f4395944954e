"""The device that a trainer computes on, and whether its memory is large enough."""

import torch

from headrace import machine_memory
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.policy import device
from headrace.policy.config import PolicyConfig
from headrace.policy.numerics import Numerics
from headrace.training import memory_plan
from headrace.training.figures.layout import Layout, layout_of
from headrace.training.memory_plan import MemoryPlan


class TrainerError(HeadraceError):
    """The trainer cannot start, or cannot take a step, as configured; the text says what is wrong."""


def device_named(name: str) -> torch.device:
    """The device of `[trainer] device`. TrainerError when this machine does not have it."""
    try:
        return device.named(name, "[trainer] device")
    except device.DeviceError as error:
        raise TrainerError(str(error)) from None


def check_exact(config: Config, numerics: Numerics) -> None:
    """TrainerError when exact mode is configured and this machine has none."""
    if config.engine.exact and not numerics.exact:
        raise TrainerError(
            f"[engine] exact = true, but this machine has no exact mode: {numerics.reason}; set it to false"
        )


def available_bytes(where: torch.device) -> int:
    """Free bytes of a device; for the CPU, the kernel's estimate of the memory that is available without swapping."""
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    if (free := machine_memory.available_bytes()) is not None:
        return free
    raise TrainerError("expected a line MemAvailable in /proc/meminfo, there is none; a Linux kernel >= 3.14 is needed")


def layout_on(config: Config, where: torch.device) -> Layout:
    """The layout of a trainer on a device: a CPU's memory is the host's, so nothing is offloaded from it."""
    layout = layout_of(config)
    cpu = where.type == "cpu"
    return layout._replace(offload=layout.offload and not cpu, cpu=cpu)


def planned(config: Config, policy: PolicyConfig, where: torch.device) -> MemoryPlan:
    """The memory plan of a trainer on a device, as `memory_plan.plan`."""
    return memory_plan.plan(policy, layout_on(config, where))


def check_device(config: Config, needed: MemoryPlan, where: torch.device) -> None:
    """TrainerError when the memory plan is larger than the free memory of this process's device, or its share of the
    host's. A trainer that was killed before this one may take some seconds to free it."""
    layout = layout_on(config, where)
    local, cpu = layout.local, torch.device("cpu")
    share = 1 if where.type == "cuda" else local
    free = memory_plan.freed(needed.total, lambda: available_bytes(where) // share)
    host = memory_plan.freed(needed.host.total, lambda: available_bytes(cpu) // local)
    check_memory(needed, layout, free, host)


def check_memory(needed: MemoryPlan, layout: Layout, available: int, host: int) -> None:
    """TrainerError when the memory plan of a trainer is larger than the available bytes.

    available: of its device; host: of the host's memory, for each process.
    """
    if needed.total > available:
        raise TrainerError(
            f"the trainer needs {needed.total / memory_plan.GIB:.1f} GiB and its device has "
            f"{available / memory_plan.GIB:.1f} GiB free, with micro-batches of up to {layout.inputs} tokens; "
            "`headrace trainer plan` shows the causes and what would fit"
        )
    if needed.host.total > host:
        raise TrainerError(
            f"[trainer] offload: the trainer needs {needed.host.total / memory_plan.GIB:.1f} GiB of the host's memory "
            f"for each process and {host / memory_plan.GIB:.1f} GiB are free; `headrace trainer plan` shows the causes"
        )
