"""Conversion of float32 masters to the served weights: rounding to the dtype, or to their number format for experts.

The idea: the optimizer never sees a rounded number. After each update every master is cast into the model, and the
model holds exactly the values that engines get. `kernels.mxfp8` has the table of casts. With `Model.served_dtype` =
bfloat16 a float32 model holds values that bfloat16 can represent: products are computed in float32, and bytes and
deltas are published in bfloat16.
"""

import torch
from torch import Tensor, nn

from headrace.config import Config
from headrace.kernels import operators
from headrace.policy.seam import PolicyModel


def quantised(model: PolicyModel, name: str) -> bool:
    """Whether a parameter, by `Model`'s name, is served in the experts' number format."""
    if not model.config.expert_format:
        return False
    return name.rsplit(".", 1)[-1] in ("gate_up", "down") and model.get_parameter(name).dim() == 3


def master_of(model: PolicyModel, name: str, parameter: nn.Parameter, *, host: bool = False) -> Tensor:
    """The float32 master of a parameter: the parameter itself where it is float32 and served without rounding.

    host: in the host's memory, from which a GPU can read it directly, where the parameter is on another device.
    """
    if host and parameter.device.type != "cpu":
        pinned = parameter.device.type == "cuda"
        master = torch.empty(parameter.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
        return master.copy_(parameter.detach())
    if parameter.dtype == torch.float32 and not quantised(model, name) and model.served_dtype is None:
        return parameter
    return parameter.detach().float().clone()


@torch.no_grad()
def cast_into(model: PolicyModel, name: str, parameter: nn.Parameter, master: Tensor) -> None:
    """Write a master into the model as it is served. A master on the host is rounded to the dtype there, so that fewer
    bytes are sent to the device."""
    if quantised(model, name):
        # A shard can be rounded alone: shards are cut between experts, and a block is within a row.
        values = _local(master).to(parameter.dtype).to(parameter.device)
        tensors = 2 if name.endswith("gate_up") else 1
        _local(parameter).copy_(operators.rounded_weights(values, model.config.expert_format, tensors))
    else:
        served = master if model.served_dtype is None else master.to(model.served_dtype)
        parameter.copy_(served.to(parameter.dtype) if served.device != parameter.device else served)


def _local(x: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor unchanged."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def served_as(config: Config, model: PolicyModel) -> PolicyModel:
    """The model, set to hold values of the published precision where that is narrower than its dtype."""
    if config.weights.precision == "bf16" and model.config.dtype == "float32":
        model.served_dtype = torch.bfloat16
    return model
