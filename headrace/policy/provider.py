"""Makes what a policy's provider has: its model, its cache, and the names of what it publishes.

`[policy] provider` names the provider: `native` is `policy.model`, the only one with exact mode; `transformers` is
`policy.hugging`, any causal language model of that library. A `PolicyConfig` with a `source` is of the second one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.policy.adapters import low_rank
from headrace.policy.cache import KVCache
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import names
from headrace.policy.numerics import Numerics
from headrace.policy.seam import PolicyModel


def build(config: PolicyConfig, numerics: Numerics, *, seed: int | None = None, device: str = "cpu") -> PolicyModel:
    """The model of a policy. seed None leaves the parameters unset. The transformers provider sets the adapters alone:
    the other parameters come from a folder. device: of the parameters; meta takes no memory."""
    if config.source:
        from headrace.policy.hugging.model import HuggingModel  # it imports transformers

        return HuggingModel(config, numerics, seed=seed, device=device)
    from headrace.policy.model import Model

    return Model(config, numerics, seed=seed, device=device)


def new_cache(config: PolicyConfig, blocks: int, device: torch.device | str = "cpu") -> Any:
    """A `Cache` for `forward_cached`."""
    if config.source:
        from headrace.policy.hugging.cache import Sequences

        return Sequences(config, blocks)
    return KVCache(config, blocks, device)


def keeps_dtype(config: PolicyConfig, name: str) -> bool:
    """Whether a parameter, by the model's name, is never rounded to the policy's dtype: a correction of a router."""
    if config.source:
        from headrace.policy.hugging import adapter, published

        return adapter.plain(name) in published.kept(config)
    return name.rsplit(".", 1)[-1] == "correction"


def views(config: PolicyConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published name -> the part of a parameter that it names. parameters: their data, by the model's names."""
    if config.source:
        from headrace.policy.hugging import published

        return published.views(config, parameters)
    return names.views(config, parameters)


def merged(config: PolicyConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors of a policy without its adapters, which are added to the weights under them."""
    if config.source:
        from headrace.policy.hugging.model import merged as library

        return library(config, tensors)
    return low_rank.merge(config.adapter, tensors) if config.adapter else dict(tensors)
