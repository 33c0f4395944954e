"""Calls of PyTorch's own CUDA kernels in ordinary mode; `kernels.library` decides where.

Dimensions: as in `kernels.block_attention` and `kernels.grouped_mm`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import dispatch, grouped_mm, library
from headrace.kernels.block_attention import Packing
from headrace.kernels.grouped_mm import Ends


@functools.cache
def capability(device: torch.device) -> int:
    """The major compute capability of a CUDA device; 0 for other devices."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _chip(x: Tensor) -> tuple[str, int]:
    """Type and compute capability of a tensor's device; Hopper's for a tensor that stands for a GPU's."""
    return ("cuda", library.HOPPER) if dispatch.STANDING.gpu else (x.device.type, capability(x.device))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _varlen_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    why = library.attention_refusal(device.type, _name(dtype), head_dim, value_dim)
    if not why and (capability(device) < library.AMPERE or not torch.backends.cuda.is_flash_attention_available()):
        return f"{library.VARLEN} needs flash attention, which this GPU or this build of torch does not have"
    return why


def varlen_refusal(q: Tensor, v: Tensor) -> str:
    """Why packed attention in ordinary mode is not `varlen_attention` here; empty where it is."""
    if dispatch.STANDING.gpu:
        return library.attention_refusal("cuda", _name(q.dtype), q.shape[2], v.shape[2])
    return _varlen_refusal(q.device, q.dtype, q.shape[2], v.shape[2])


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within packed sequences: q [N, H, D], k and v [N, V, D] -> [N, H, D]. Differentiable.

    For backward it keeps q, k, v, the result and a log-sum-exp per head, as the kernel of exact mode does.
    """
    if not packing.tokens:
        return torch.zeros_like(q)
    # Imported here: the module loads torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q, k, v, **varlen_arguments(varlen_attn, packing, scale, q.shape[1] != k.shape[1]))
    assert isinstance(out, Tensor)  # a tuple where `return_aux` is given
    return out


def varlen_arguments(function: Callable[..., Any], packing: Packing, scale: float, grouped: bool) -> dict[str, Any]:
    """The arguments of a `varlen_attn` after queries, keys and values. grouped: several query heads for each key head.

    torch 2.13 asks for a flag for grouped heads; 2.11 has none and takes them as they are.
    """
    out: dict[str, Any] = {
        "cu_seq_q": packing.borders,
        "cu_seq_k": packing.borders,
        "max_q": packing.longest,
        "max_k": packing.longest,
        "scale": scale,
        "window_size": (-1, 0),  # causal
    }
    if grouped and "enable_gqa" in inspect.signature(function).parameters:
        out["enable_gqa"] = True
    return out


class Products(NamedTuple):
    """The three products of experts, with the arguments of the functions in `kernels.grouped_mm`."""

    forward: Callable[[Tensor, Tensor, Ends, torch.dtype], Tensor]
    dgrad: Callable[[Tensor, Tensor, Ends, torch.dtype], Tensor]
    wgrad: Callable[[Tensor, Tensor, Ends, torch.dtype], Tensor]


def _offsets(ends: Ends, device: torch.device) -> Tensor:
    return torch.as_tensor(ends, device=device).to(torch.int32)


def _forward(x: Tensor, w: Tensor, ends: Ends, dtype: torch.dtype) -> Tensor:
    return F.grouped_mm(x, w.transpose(1, 2), offs=_offsets(ends, x.device)).to(dtype)


def _dgrad(g: Tensor, w: Tensor, ends: Ends, dtype: torch.dtype) -> Tensor:
    return F.grouped_mm(g, w, offs=_offsets(ends, g.device)).to(dtype)


def _wgrad(g: Tensor, x: Tensor, ends: Ends, dtype: torch.dtype) -> Tensor:
    return F.grouped_mm(g.t(), x, offs=_offsets(ends, g.device)).to(dtype)


LIBRARY = Products(_forward, _dgrad, _wgrad)
"""`F.grouped_mm`. Rows behind the last expert's are not set; no slot gathers them."""
TRITON = Products(grouped_mm.grouped_mm_triton, grouped_mm.grouped_dgrad_triton, grouped_mm.grouped_wgrad_triton)


def experts_refusal(x: Tensor, experts: int, inner: int, rows: int, exact: bool) -> str:
    """Why the products of these experts are not `F.grouped_mm`. x [N, D]; inner: the experts' width I; rows: P."""
    many = rows >= grouped_mm.MANY_ROWS * experts
    device, chip = _chip(x)
    return library.experts_refusal(device, _name(x.dtype), exact, (x.shape[1], inner), chip, many)


def products(x: Tensor, down: Tensor, rows: int, exact: bool) -> Products:
    """The products of experts on a GPU. x [N, D], down [E, D, I]; rows: P."""
    return TRITON if experts_refusal(x, len(down), down.shape[2], rows, exact) else LIBRARY


def taken(device: torch.device, dtype: torch.dtype, head_dim: int, widths: tuple[int, ...]) -> list[str]:
    """The names of PyTorch's kernels that ordinary mode takes with many rows. widths: of experts; empty without."""
    names = []
    if not _varlen_refusal(device, dtype, head_dim, head_dim):
        names.append(library.VARLEN)
    if widths and not library.experts_refusal(device.type, _name(dtype), False, widths, capability(device), True):
        names.append(library.GROUPED)
    return names
