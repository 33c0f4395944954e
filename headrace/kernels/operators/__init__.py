"""The operations of the model: one call each, the torch twin on a CPU and the Triton kernel on a GPU.

Every operation is a `torch.library` custom operator `headrace::*` with a kernel for the CPU (the twin), one for CUDA
(Triton), a rule for shapes alone and, where training needs it, a gradient that is an operator itself. The functions
here decide by the device of their operand (`dispatch.twin`): a CPU tensor goes to the twin without the dispatcher,
anything else through `torch.ops`. So the engine and the trainer, which both call them, run Triton as soon as their
model lies on a GPU.

On CUDA devices, ordinary mode takes kernels of PyTorch for packed attention and the experts' products (`library`).
Additions are plain torch operations on every device.
"""

from headrace.kernels.grouped_mm import Nv
from headrace.kernels.operators.attention import cached_attention, packed_attention
from headrace.kernels.operators.elementwise import rotate, swiglu
from headrace.kernels.operators.experts import (
    experts,
    experts_backward,
    experts_forward,
    permute,
    route,
    unpermute,
)
from headrace.kernels.operators.formats import (
    apply_changes,
    cast,
    changes,
    quantise,
    quantise_nvfp4,
    rounded,
    rounded_weights,
)
from headrace.kernels.operators.library import varlen_attention, varlen_refusal
from headrace.kernels.operators.likelihood import selected_logprob
from headrace.kernels.operators.products import linear, rms_norm

__all__ = [
    "Nv",
    "apply_changes",
    "cached_attention",
    "cast",
    "changes",
    "experts",
    "experts_backward",
    "experts_forward",
    "linear",
    "packed_attention",
    "permute",
    "quantise",
    "quantise_nvfp4",
    "rms_norm",
    "rotate",
    "rounded",
    "rounded_weights",
    "route",
    "selected_logprob",
    "swiglu",
    "unpermute",
    "varlen_attention",
    "varlen_refusal",
]
