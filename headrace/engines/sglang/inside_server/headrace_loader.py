"""Runs inside the SGLang server: writes a version's changed elements into the weights that it computes with.

`--custom-weight-loader headrace_loader.apply` names it, this folder is on the server's PYTHONPATH
(`engines.sglang.server` sets both). It must not raise: an exception here ends the scheduler. So everything is checked
before the first element is written, and a file that does not fit is not applied; headrace compares checksums afterwards
and then loads the version in full. A GPU may still lack memory for a tensor's indices, and then a part was applied.
headrace is not imported, because the server's environment does not have it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open


def apply(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """named_tensors: one pair, whose name is the path of a file that `sglang_sparse.write` wrote."""
    ((path, _),) = named_tensors
    try:
        live = dict(model.named_parameters())
        with safe_open(path, framework="pt") as file:
            sizes = file.metadata() or {}
            changes = {name: (file.get_tensor(f"{name}.at"), file.get_tensor(f"{name}.to")) for name in sizes}
        for name, (_, to) in changes.items():
            here = live[name].data
            if here.numel() != int(sizes[name]) or here.dtype != to.dtype or not here.is_contiguous():
                raise ValueError(f"{name} is {here.dtype} of {here.numel()} elements here")
    except Exception as error:
        print(f"headrace_loader: nothing of {path} was applied: {error}", flush=True)  # noqa: T201
        return
    try:
        with torch.no_grad():
            for name, (at, to) in changes.items():
                flat = live[name].data.view(-1)
                flat.index_copy_(0, at.to(flat.device), to.to(flat.device))
    except Exception as error:  # for example a GPU without memory for the indices
        print(f"headrace_loader: a part of {path} was applied: {error}", flush=True)  # noqa: T201
