"""The library's models: built without weights, and their blocks and routers found by interface."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from headrace.errors import HeadraceError
from headrace.policy.config import CheckpointError, PolicyConfig


def transformers() -> Any:
    """The library. CheckpointError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            "[policy] provider = 'transformers': the library is not installed; install headrace[models]"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def parsed(source: str) -> Any:
    """The library's config of a config.json. CheckpointError."""
    raw = json.loads(source)
    library = transformers()
    kind = str(raw.get("model_type"))
    try:
        if kind not in library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise CheckpointError(
                f"model_type {kind!r} is no causal language model of transformers {library.__version__}; code of a "
                "folder (auto_map) is never run"
            )
        return library.AutoConfig.for_model(**{"model_type": kind} | raw)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointError(f"config.json is not one of transformers' {kind}: {error}") from None


def skeleton(source: str, dtype: torch.dtype) -> Any:
    """The model of a config.json on the device meta, in evaluation mode. Buffers that a checkpoint holds are parameters
    without a gradient, so that they are published, kept and restored as all weights are; those keep their dtype."""
    config = parsed(source)
    try:
        # float32, because the library would change torch's default dtype, which other threads read.
        with torch.device("meta"):
            model = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except HeadraceError:
        raise
    except Exception as error:
        raise CheckpointError(f"transformers cannot make this model: {type(error).__name__}: {error}") from None
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    model.config.dtype = dtype
    return model.eval()


def materialised(model: Any, device: str) -> Any:
    """A `skeleton` with memory for its weights, which are unset. On the device meta they have none; what follows from
    the config alone is computed there too, in the host's memory."""
    if device == "meta":
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
    else:
        model.to_empty(device=device)
        model.tie_weights()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    return model


def blocks(model: Any) -> list[nn.Module]:
    """The decoder's blocks, by the classes that the model says must not be split, in their order."""
    kinds = set(model._no_split_modules or ())
    deepest: list[list[nn.Module]] = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(type(each).__name__ in kinds for each in module)
    ]
    decoder = model.get_decoder()
    inner = set(decoder.modules())
    return max((found for found in deepest if found[0] in inner), key=len, default=[])


def parent(block: nn.Module, kinds: tuple[type, ...]) -> nn.Module | None:
    """The module of a block that holds its router."""
    for module in block.modules():
        for name, child in module.named_children():
            known = isinstance(child, kinds) if kinds else False
            if known or ("experts" in dict(module.named_children()) and name in ("gate", "router")):
                return module
    return None


def router_kinds(model: Any) -> tuple[type, ...]:
    """The classes of routers that the model declares: those whose logits the library can record."""
    found = []
    for module in model.modules():
        for recorder in _recorders(getattr(module, "_can_record_outputs", None) or {}):
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type):
                found.append(kind)
    return tuple(dict.fromkeys(found))


def _recorders(declared: dict[str, Any]) -> Iterator[Any]:
    one = declared.get("router_logits", ())
    yield from one if isinstance(one, list | tuple) else (one,)


@cache
def outline(config: PolicyConfig) -> Any:
    """The `skeleton` of a policy, to be looked at alone."""
    return skeleton(config.source, config.torch_dtype)
