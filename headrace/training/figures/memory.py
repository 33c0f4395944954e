"""The peak of a step's memory, which StepDone shows beside the memory plan.

On CUDA it is the peak of allocated bytes, which is what the plan counts. On the CPU torch does not count its bytes, and
a count of live tensors would delay every operation. So there it is resident memory: its growth since this process was
about to make a policy, because that is the memory that the trainer demands before it starts. It also has what no plan
counts: records, code, threads, mapped files, and freed memory that the allocator keeps. For a small policy it is many
times the plan.
"""

from functools import cache
from pathlib import Path

import torch


class Peak:
    """The peak of this process's memory since the object was made."""

    def __init__(self, device: torch.device) -> None:
        """device: the trainer's."""
        self._device, self._measured = device, True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel's VmHWM starts again
        except OSError:
            self._measured = False  # a kernel without it knows only the peak since the process began

    @property
    def bytes(self) -> int:
        """0 where it cannot be measured."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _resident("VmHWM") - without_policy()) if self._measured else 0


@cache
def without_policy() -> int:
    """Resident bytes of this process at the first call, which must come before its first policy is made."""
    return _resident("VmRSS")


def _resident(key: str) -> int:
    """Bytes of a key of /proc/self/status; 0 without it."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0
