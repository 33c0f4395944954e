"""Rotary frequencies, and the ways in which checkpoints stretch them to longer contexts.

A scaling is a pure function of the head's width: it changes the frequencies once, and cos and sin by one factor. The
formulas are those of the papers, in transformers' order of operations, so that logits agree:
    linear   positions divided by `factor` (Chen et al., arXiv 2306.15595)
    yarn     high frequencies stay, low ones are divided, a ramp between (Peng et al., arXiv 2309.00071)
    llama3   the same idea by wavelength, with a smooth middle (Llama 3, arXiv 2407.21783)
Scalings that depend on the length of the sequence (dynamic, longrope) are refused, because with them a position's bits
depend on the tokens after it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["linear", "yarn", "llama3"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`rope_parameters` of a config.json, less theta; names are Hugging Face's."""

    rope_type: Kind
    factor: float
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @property
    def heat(self) -> float:
        """The factor on the softmax scale of latent attention: squared mscale (DeepSeek-V3, arXiv 2412.19437)."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def parse(raw: dict[str, Any], positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a config.json, in transformers 5's spelling or the older one. ValueError names what is not
    supported. positions: `max_position_embeddings`, which stands in for a missing original length."""
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(f"rope_type {kind!r} is not supported, only default, linear, yarn and llama3")
    fields = {name: given[name] for name in RopeScaling.__struct_fields__ if given.get(name) is not None}
    fields |= {"rope_type": kind, "original_max_position_embeddings": fields.get(_ORIGINAL) or positions}
    try:
        return theta, msgspec.convert(fields, RopeScaling, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"rope_parameters of {kind}: {error}") from None


_ORIGINAL = "original_max_position_embeddings"


def spelled(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """`rope_parameters` for a config.json."""
    if scaling is None:
        return {"rope_theta": theta, "rope_type": "default"}
    return {"rope_theta": theta, **msgspec.to_builtins(scaling)}


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [dim / 2], factor on cos and sin)."""
    import torch  # here, so that a shape can be read without torch

    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (theta**powers)
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(dim, theta, powers, scaling)


def _llama3(plain: Tensor, s: RopeScaling) -> Tensor:
    import torch

    length = s.original_max_position_embeddings
    waves = 2 * math.pi / plain
    long, short = length / s.low_freq_factor, length / s.high_freq_factor
    scaled = torch.where(waves > long, plain / s.factor, plain)
    smooth = (length / waves - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    middle = (1 - smooth) * scaled / s.factor + smooth * scaled
    return torch.where((waves >= short) & (waves <= long), middle, scaled)


def _yarn(dim: int, theta: float, powers: Tensor, s: RopeScaling) -> tuple[Tensor, float]:
    import torch

    def turns(count: float) -> float:
        """The dimension that turns `count` times over the original length."""
        return dim * math.log(s.original_max_position_embeddings / (count * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns(s.beta_fast or 32), turns(s.beta_slow or 1)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (
        (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high if high != low else high + 0.001) - low)
    ).clamp(0, 1)
    plain = 1 - ramp
    waves = theta**powers
    stretched = (1.0 / (s.factor * waves)) * (1 - plain) + (1.0 / waves) * plain
    if s.attention_factor is not None:
        return stretched, s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return stretched, _mscale(s.factor, s.mscale) / _mscale(s.factor, s.mscale_all_dim)
    return stretched, _mscale(s.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
