"""Shim 1 of 3: torchvision imports although its CUDA library can't be loaded here.

The wheel declares its operators in that library and registers fake implementations of them in Python. The declarations
alone are enough for the import, and a language model calls none of these operators.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Declare(importlib.abc.MetaPathFinder):
    """Declares the operators right before torchvision is imported, so that torch is not imported any earlier."""

    library: object = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _Declare.library = library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
        return None


sys.meta_path.insert(0, _Declare())
