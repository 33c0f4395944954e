"""Shim 2 of 3: stands in for SGLang's CUDA kernels, which many modules import and PyPI does not have for CPUs.

Every name can be imported and every call raises, so SGLang and torch alone compute the numbers of a server with this
stub.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.0.0"
__path__: list[str] = []


class _Absent:
    """A kernel that is not here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **named: object) -> Any:
        raise NotImplementedError(f"{self._name} is a CUDA kernel; this SGLang runs on a CPU without it")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"sgl_kernel.{name}")
