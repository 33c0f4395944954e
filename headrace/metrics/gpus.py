"""NVIDIA's GPUs of this machine, read through its management library (NVML), without torch or CUDA.

The library comes with the driver. Where it is not installed, or the driver does not answer, there are no GPUs. It
counts every device of the machine: CUDA_VISIBLE_DEVICES hides none.
"""

import ctypes
import functools
from typing import NamedTuple

_LIBRARY = "libnvidia-ml.so.1"


class Gpu(NamedTuple):
    """One device at this moment."""

    free: int
    """Bytes."""
    total: int
    """Bytes."""
    busy: float | None
    """Share of the driver's last sampling period, of a sixth of a second to a second, in which a kernel ran. None where
    the device does not tell, as with MIG."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@functools.cache
def installed() -> bool:
    """Whether the library can be loaded."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


@functools.cache
def _started(library: ctypes.CDLL) -> bool:
    """Initialise once per process; seconds where the driver's state is not kept (persistence mode)."""
    return bool(library.nvmlInit_v2() == 0)


def gpus() -> tuple[Gpu, ...]:
    """Every device, in NVML's order; empty where there is none. The first call may take seconds."""
    library = _library()
    if library is None or not _started(library):
        return ()
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    read = (_read(library, index) for index in range(count.value))
    return tuple(gpu for gpu in read if gpu is not None)


def _read(library: ctypes.CDLL, index: int) -> Gpu | None:
    device, memory, used = ctypes.c_void_p(), _Memory(), _Utilization()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    told = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(used)) == 0
    return Gpu(memory.free, memory.total, used.gpu / 100 if told else None)
