"""Multi-head latent attention: queries, keys and values from narrow ranks (DeepSeek-V2, arXiv 2405.04434).

Idea: keys and values of all heads are one low-rank vector per token; a small part of each key carries the position
and is shared by all heads. Here the latents are expanded before attention, so that the block loop and the KV cache are
those of every other model, and exact mode holds for the same reasons.

Trade-off: the cache holds expanded keys and values (heads x (nope + rope) each), not the latent: correct, and several
times larger than what DeepSeek's own servers keep. Values narrower than keys are padded with zeros, which changes no
bit of what remains.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels import operators
from headrace.policy.adapters import low_rank
from headrace.policy.config import Latent

_EPS = 1e-6
"""Epsilon of the norms inside. The published models use this constant and not rms_norm_eps."""


def parameters(latent: Latent, heads: int, dim: int, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """New parameters by name, unset."""

    def new(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=dtype))

    width = heads * (latent.nope_dim + latent.rope_dim)
    out = {"q": new(width, dim)}
    if latent.q_rank:
        out = {"q_a": new(latent.q_rank, dim), "q_a_norm": new(latent.q_rank), "q_b": new(width, latent.q_rank)}
    out["kv_a"] = new(latent.kv_rank + latent.rope_dim, dim)
    out["kv_a_norm"] = new(latent.kv_rank)
    out["kv_b"] = new(heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return operators.rotate(x, cos, sin)


def project(
    layer: nn.Module, h: Tensor, latent: Latent, heads: int, cos: Tensor, sin: Tensor, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, D] -> q, k, v [N, heads, nope + rope], rotated; v is zero beyond value_dim."""
    parameters = dict(layer.named_parameters(recurse=False))
    if latent.q_rank:
        low = operators.rms_norm(low_rank.linear(layer, h, "q_a", exact), parameters["q_a_norm"], _EPS)
        q = low_rank.linear(layer, low, "q_b", exact)
    else:
        q = low_rank.linear(layer, h, "q", exact)
    q_plain, q_turned = torch.split(q.view(len(h), heads, -1), [latent.nope_dim, latent.rope_dim], -1)
    both = low_rank.linear(layer, h, "kv_a", exact)
    low, k_turned = torch.split(both, [latent.kv_rank, latent.rope_dim], -1)
    low = operators.rms_norm(low.contiguous(), parameters["kv_a_norm"], _EPS)
    kv = low_rank.linear(layer, low, "kv_b", exact).view(len(h), heads, -1)
    k_plain, v = torch.split(kv, [latent.nope_dim, latent.value_dim], -1)
    q_turned = _turn(q_turned, cos, sin, latent.interleaved)
    k_turned = _turn(k_turned[:, None], cos, sin, latent.interleaved).expand(-1, heads, -1)
    q, k = torch.cat((q_plain, q_turned), -1), torch.cat((k_plain, k_turned), -1)
    return q, k, F.pad(v, (0, q.shape[-1] - latent.value_dim)).contiguous()
