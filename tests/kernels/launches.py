"""Where kernels are launched, without a GPU: run as a program, because kernels look for a GPU at their import.

It claims that there are two, hands operands of the second to a kernel and replaces the launch by a note of the current
device. Every kernel of the package must have the class whose launch chooses the device.
"""

import importlib
import pkgutil
from types import TracebackType
from typing import Any

import torch

from headrace import kernels

torch.cuda.is_available = lambda: True
current = [0]
launched: list[tuple[str, int]] = []


class Chosen:
    """`torch.cuda.device` without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index

    def __enter__(self) -> None:
        current.append(self.index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        current.pop()


class Claimed(torch.Tensor):
    """A tensor that claims to be on the second GPU."""

    @staticmethod
    def __new__(cls, *shape: int) -> "Claimed":
        made: Claimed = torch.Tensor._make_wrapper_subclass(cls, shape, device=torch.device("cuda", 1))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} computes with the operand of a launch")


if __name__ == "__main__":
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append((self.__name__, current[-1]))

    jit: Any = JITFunction
    jit.run = run
    torch.cuda.device = Chosen  # type: ignore[assignment, misc]
    kinds = {}
    for module in pkgutil.walk_packages(kernels.__path__, "headrace.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction):
                kinds[f"{value.fn.__module__}.{name}"] = type(value)
    from headrace.kernels import dispatch
    from headrace.kernels.elementwise import swiglu

    other = sorted(name for name, kind in kinds.items() if kind is not dispatch._Kernel)
    assert len(kinds) > 30 and not other, f"not launched on the operands' device: {other}"
    swiglu._forward_kernel[(1,)](Claimed(4, 8), Claimed(4, 4), 4, BW=4)
    swiglu._forward_kernel[(1,)](torch.zeros(4, 8), torch.zeros(4, 4), 4, BW=4)
    print(launched)
