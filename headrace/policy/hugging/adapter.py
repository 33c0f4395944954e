"""Low-rank adapters of a model of transformers: PEFT puts them into it, for any of the library's types.

Projections are wrapped by their names. Experts are one parameter for all of a layer, which PEFT adapts as a whole where
its name is among the targets. A version publishes W under the name that it has without adapters, and A and B under
the names of a PEFT folder.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from headrace.policy.config import Adapter, CheckpointError, PolicyConfig
from headrace.policy.hugging import library


def resolved(c: PolicyConfig, rank: int, alpha: float, targets: Sequence[str]) -> Adapter:
    """The adapter with these targets; without any, all projections of the blocks except routers and experts.
    CheckpointError for one that no block has, and where PEFT is not installed."""
    _peft()
    model = library.skeleton(c.source, c.torch_dtype)
    kinds = library.router_kinds(model)
    linear: dict[str, None] = {}
    experts: dict[str, None] = {}
    for block in library.blocks(model):
        mixture = library.parent(block, kinds)
        for path, module in block.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, nn.Linear) and not (mixture is not None and module in mixture.children()):
                linear[name] = None
        experts |= dict.fromkeys(_experts(block))
    for name in targets:
        if name not in linear | experts:
            possible = ", ".join(linear | experts)
            raise CheckpointError(f"[trainer.lora] targets: expected names among {possible}, got {name!r}")
    chosen = targets or [name for name in linear if name not in experts]
    parts = tuple(name for name in chosen if name in experts)
    made = Adapter(rank=rank, alpha=alpha, targets=tuple(chosen), parameters=parts)
    low = skeleton(msgspec.structs.replace(c, adapter=made)).named_parameters()
    elements = sum(value.numel() for name, value in low if ".lora_" in name)
    return msgspec.structs.replace(made, elements=elements)


def _experts(block: nn.Module) -> list[str]:
    """The last names of parameters that hold a matrix of every expert."""
    names = [path.rpartition(".")[2] for path, value in block.named_parameters() if value.dim() == 3]
    return [name for name in names if name != "weight"]  # a convolution has this name


def skeleton(config: PolicyConfig) -> Any:
    """`library.skeleton` of a policy with its adapters, which alone are trained."""
    model = library.skeleton(config.source, config.torch_dtype)
    adapter = config.adapter
    if adapter is None:
        return model
    peft = _peft()
    settings = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.targets),
        target_parameters=[f"experts.{name}" for name in adapter.parameters] or None,
        init_lora_weights=False,
    )
    try:
        peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise CheckpointError(f"[trainer.lora]: PEFT cannot adapt this model: {error}") from None
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(config.torch_dtype)
    return model.eval()


def plain(name: str) -> str:
    """The published name of a parameter: as in a model without adapters, or in a PEFT folder."""
    if ".lora_" in name:
        return name.replace(".default.", ".")
    return name.replace(".base_layer", "")


@torch.no_grad()
def merge(model: Any) -> None:
    """Add the adapters to the weights under them, in float32, rounded once. model: with adapters."""
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model.float()
    for module in list(model.modules()):
        if hasattr(module, "lora_A"):
            module.merge()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise CheckpointError(
            "[trainer.lora] with the provider transformers needs the library PEFT; install headrace[models]"
        ) from None
    return peft
