"""Tensors that hold CPU data and claim to be on another device, so that a test without a GPU finds what mixes devices.

`Elsewhere` wraps a CPU tensor and reports the device `meta`. An operation on a wrapped and a plain tensor (other than a
0-dim one) raises, as CUDA would; results of wrapped tensors are wrapped. The numbers are computed on the CPU, so they
must equal those of the plain run bit for bit. Reads by the host are counted by the line of headrace that makes them.

Tensors that Python literals make (`torch.tensor(..., device=...)`) pass no dispatch mode: `installed` replaces the two
functions for the time of a test.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CLAIMED = torch.device("meta")
READS: Counter[str] = Counter()
"""File and line in headrace to how often the host read a value there."""
_LOCK = threading.Lock()
_READING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "bincount"}
_COPYING = {"copy_", "_to_copy", "copy", "set_"}


class Elsewhere(torch.Tensor):
    """A tensor on the claimed device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Elsewhere":
        wrapped: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            dtype=held.dtype,
            device=CLAIMED,
            requires_grad=held.requires_grad,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
        )
        return wrapped

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> "Elsewhere":
        return Elsewhere(self.held.clone())


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Factories with a device, and copies of plain tensors to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def held(x: Any) -> Any:
    """The CPU tensor of a wrapped one; anything else as it is."""
    return x.held if isinstance(x, Elsewhere) else x


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    wrapped = [x for x in tensors if isinstance(x, Elsewhere)]
    plain = [x for x in tensors if not isinstance(x, Elsewhere) and x.dim() > 0]
    name = func.overloadpacket._qualified_op_name.split("::")[-1]
    if wrapped and plain and name not in _COPYING:
        raise RuntimeError(f"{name} mixes devices at {_site()}")
    wanted = kwargs.get("device")
    to_claimed = wanted is not None and torch.device(wanted).type == CLAIMED.type
    if wrapped and (name in _READING or (wanted is not None and not to_claimed)):
        with _LOCK:
            READS[_site()] += 1
    cpu_kwargs = {**kwargs, "device": torch.device("cpu")} if to_claimed else dict(kwargs)
    cpu_kwargs.pop("pin_memory", None)
    out = func(*tree_map(held, args), **tree_map(held, cpu_kwargs))
    stays = isinstance(args[0], Elsewhere) if name == "copy_" else bool(wrapped)
    if name in ("_local_scalar_dense", "equal", "is_nonzero") or not (to_claimed if wanted is not None else stays):
        return out
    written = [arg for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    if written:  # in-place operations return their argument itself
        values = [*args, *(kwargs.get(arg.name) for arg in func._schema.arguments[len(args) :])]
        targets = [v for arg, v in zip(func._schema.arguments, values, strict=False) if arg in written]
        returns = len(func._schema.returns)
        return None if not returns else targets[0] if returns == 1 else tuple(targets)
    return tree_map(lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, out)


def _site() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/headrace/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/headrace/', 1)[-1]}:{frame.f_lineno}" if frame else "autograd"


def moved(model: nn.Module) -> nn.Module:
    """The model with its parameters on the claimed device, in place."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                wrapped = Elsewhere(parameter.detach().clone())
                module._parameters[name] = nn.Parameter(wrapped, requires_grad=parameter.requires_grad)
    return model


def also_here() -> TorchDispatchMode:
    """`installed` holds for its own thread; within this it holds for another one."""
    return _Mode()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, tensors may be put on the claimed device."""
    READS.clear()

    def literal(old: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(data: Any, *rest: Any, **options: Any) -> torch.Tensor:
            device = options.get("device")
            if device is None or torch.device(device).type != CLAIMED.type:
                return old(data, *rest, **options)
            options.pop("device")
            if isinstance(data, Elsewhere):
                return data.to(options["dtype"]) if "dtype" in options else data
            return Elsewhere(old(data, *rest, **options))

        return make

    for name in ("tensor", "as_tensor"):
        patch.setattr(torch, name, literal(getattr(torch, name)))
    for module in ("adam", "adamw", "optimizer"):
        loaded = sys.modules.get(f"torch.optim.{module}")
        if hasattr(loaded, "_get_fused_kernels_supported_devices"):
            patch.setattr(loaded, "_get_fused_kernels_supported_devices", lambda: ["cpu", CLAIMED.type])
    # Wrapped tensors have no inference mode: views of the results of `torch.inference_mode` cannot be made.
    patch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext())
    with _Mode():  # type: ignore[no-untyped-call]
        yield
