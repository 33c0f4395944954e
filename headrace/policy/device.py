"""The device that a section of the configuration names, for engines and trainers."""

import contextlib

import torch

from headrace.errors import HeadraceError


class DeviceError(HeadraceError):
    """This machine does not have the configured device; the text says what it has."""


def named(name: str, key: str) -> torch.device:
    """The device that `name` stands for: auto (the first CUDA device, else the CPU), cpu, cuda or cuda:N.

    key: the configuration's key, for the text of DeviceError.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{key}: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= count:
        raise DeviceError(f"{key}: this machine has no {name}; it has {torch.cuda.device_count()} CUDA devices")
    return device


def select(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread: Triton launches kernels there, wherever its operands lie."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def selected(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """`select` for the time of a block; nothing on other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
