"""What a trainer owns: the model in the dtype that engines serve, float32 master weights, the optimizer, the counters.

The idea: the forward pass runs on exactly the bytes that are published, so the trainer's log-probabilities are those of
the sampler. The optimizer works on float32 masters, which are rounded into the model after each update; where the
model is float32 itself, the masters are its own parameters and nothing is copied. AdamW (Loshchilov & Hutter, arXiv
1711.05101) as torch has it, fused: one pass over the memory, the same bits for the same inputs.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.policy.model import Model
from headrace.training import precision
from headrace.weights.state import state_hash


class TrainerState:
    """Model, masters, optimizer, version and step. `version` is that of the model's current bytes."""

    def __init__(
        self, model: Model, *, version: int = 0, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
    ) -> None:
        """A fresh optimizer over the model's weights."""
        self.model = model
        self.version = version
        self.step = 0
        """Updates taken by this optimizer; failed steps count as versions, not here."""
        self.master: dict[str, Tensor] = {
            name: precision.master_of(model, name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(
            list(self.master.values()), lr=0.0, betas=betas, eps=1e-8, weight_decay=weight_decay, fused=True
        )

    def published(self) -> dict[str, Tensor]:
        """The served bytes: Hugging Face names to detached tensors of the model's dtype, sharing its memory."""
        return {name: value.detach() for name, value in self.model.state().items()}

    def hash(self) -> str:
        """State hash of the served bytes."""
        return state_hash(self.published())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients, summed in float64; NaN or infinite when any of them is."""
        total = 0.0
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                total += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        return math.sqrt(total) if math.isfinite(total) else math.nan

    @torch.no_grad()
    def apply(self, learning_rate: float, scale: float = 1.0) -> None:
        """One update from the model's gradients times `scale` (for clipping), then round the masters into the model."""
        own = dict(self.model.named_parameters())
        for name, master in self.master.items():
            gradient = own[name].grad
            if gradient is None:  # an expert that no token reached: the moments still decay, in every replica alike
                gradient = torch.zeros_like(own[name])
            master.grad = gradient.float() if scale == 1.0 else gradient.float() * scale
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for name, master in self.master.items():
            if master is not own[name]:
                precision.cast_into(self.model, name, own[name], master)
            master.grad = None
        self.zero_grad()
        self.step += 1

    def tensors(self) -> dict[str, Tensor]:
        """Everything that an update depends on, by flat name: for checkpoints."""
        out: dict[str, Tensor] = {}
        for name, master in self.master.items():
            out[f"master.{name}"] = master.detach()
            moments = self.optimizer.state.get(master, {})
            for key in ("exp_avg", "exp_avg_sq"):
                if key in moments:
                    out[f"{key}.{name}"] = moments[key]
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                out[f"frozen.{name}"] = parameter.detach()
        return out

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, version: int, step: int) -> None:
        """Take over what `tensors` gave. KeyError when one is missing, ValueError when a shape differs."""
        own = dict(self.model.named_parameters())
        for name, master in self.master.items():
            saved = tensors[f"master.{name}"]
            if saved.shape != master.shape:
                raise ValueError(f"{name}: the checkpoint has shape {tuple(saved.shape)}, not {tuple(master.shape)}")
            master.copy_(saved)
            if master is not own[name]:
                precision.cast_into(self.model, name, own[name], master)
            self.optimizer.state.pop(master, None)
            if step:
                self.optimizer.state[master] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": tensors[f"exp_avg.{name}"].clone(),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].clone(),
                }
        for name, parameter in own.items():
            if not parameter.requires_grad:
                parameter.copy_(tensors[f"frozen.{name}"])
        self.zero_grad()
        self.version, self.step = version, step
