"""The trainer's state: the model in the dtype that engines serve, float32 master weights, optimizer and counters.

The idea: the forward pass runs on exactly the bytes that are published, so the trainer's log-probabilities are those of
the sampler. The optimizer updates float32 masters, which are rounded into the model after each update; where the model
is float32 itself, the masters are its parameters and nothing is copied. Gradients of micro-batches are added in float32
too: in bfloat16 the sum of 16 has a relative error of 5e-3.

All tensors are on the model's device. With `offload`, masters and moments are in the host's memory: the gradient of one
parameter after the other is copied there, AdamW runs there, and the new weights go back in the model's dtype. The
device then holds weights and sums of gradients alone. Trade-off: a step copies 4 bytes per parameter to the host and 2
back, and the host's cores compute the update.
"""

import fnmatch
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.algorithms.adamw import AdamW, Moments, OptimizerSettings
from headrace.policy.adapters import low_rank
from headrace.policy.config import CheckpointError
from headrace.policy.seam import PolicyModel
from headrace.training.parallel.interface import SINGLE_PROCESS, Peers
from headrace.training.served import precision, runs
from headrace.training.served.publication import Contents, Publication, Publisher
from headrace.training.served.versions import Log, change
from headrace.weights.tensor_state import state_hash

_ROW = 4096
"""Numbers whose squares are added in float32; in float64 torch converts each, and takes 25 times as long."""


def squares(gradients: Iterable[Tensor]) -> float:
    """The sum of all squares: in float32 over each `_ROW` numbers, over these in float64."""
    sums = []
    for gradient in gradients:
        flat = gradient.reshape(-1)
        whole = len(flat) // _ROW * _ROW
        for part in (flat[:whole].view(-1, _ROW), flat[whole:]):
            sums.append(torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).double().square().sum())
    return math.fsum(torch.stack(sums).cpu().tolist()) if sums else 0.0


class TrainerState:
    """Model, masters, optimizer, version and step. `version` is the version of the model's current bytes."""

    def __init__(
        self, model: PolicyModel, *, version: int = 0, settings: OptimizerSettings | None = None, offload: bool = False
    ) -> None:
        """A fresh optimizer over the model's weights. offload: masters and moments are in the host's memory; with a
        model on the CPU this changes nothing."""
        self.model = model
        self.version = version
        self.offload = offload
        self.step = 0
        """Number of updates by this optimizer. A failed step makes a version but no update."""
        self.updated_at: float | None = None
        """time.perf_counter() at the end of the last update; None where the step before made none."""
        self.publication: Publication | None = None
        """The newest version that was published: a thread may be reading the weights."""
        self._publisher: Publisher | None = None
        self.log: Log | None = None
        """Every write to the served weights appends its undo entry here (`served.versions`); None records nothing."""
        self.master = self._masters()
        if model.served_dtype is not None:
            for name, parameter in model.named_parameters():  # frozen parameters are published too
                precision.cast_into(model, name, parameter, self.master.get(name, parameter).detach())
        self._sums: dict[str, Tensor] = {}
        """float32 sums of the micro-batches' gradients, for parameters with another dtype."""
        self.optimizer = AdamW(self.master, settings or OptimizerSettings())

    def parameters(self) -> dict[str, Tensor]:
        """The weights that this process holds, by `Model`'s names. A float32 parameter may be its own master."""
        return dict(self.model.named_parameters())

    def _masters(self) -> dict[str, Tensor]:
        """The float32 master of every trained parameter, by name."""
        return {
            name: precision.master_of(self.model, name, parameter, host=self.offload)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def served(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter's values as they are served; the result may share the parameter's memory."""
        return parameter.detach()

    def configure(self, settings: OptimizerSettings) -> None:
        """Use other settings from the next update on."""
        self.optimizer.settings = settings

    def published(self) -> dict[str, Tensor]:
        """The served bytes: Hugging Face names to detached tensors of the model's dtype."""
        return {name: value.detach() for name, value in self.model.state().items()}

    def hash(self) -> str:
        """State hash of the served bytes."""
        return state_hash(self.published())

    def contents(self) -> Contents:
        """The served bytes, to be read piece by piece."""
        return Contents(*runs.whole(self.model.config, self.model.views()))

    def peers(self) -> Peers:
        """The processes that hold this state together, over a connection for the copying thread alone."""
        return SINGLE_PROCESS

    def publish(self, folder: Path) -> Publication:
        """Begin to write the served bytes as a file in `folder`, which is on the disk of all processes. All processes
        must call it; they may go on as long as they only read the weights, and `apply` waits for the copy."""
        if self._publisher is None:
            self._publisher = Publisher(self.peers())
        self.publication = self._publisher.start(folder, self.version, self.contents)
        return self.publication

    def settle(self, *, end: bool = False) -> None:
        """Wait until no publication is open. end: also end its threads."""
        publisher = self._publisher
        if publisher is not None:
            publisher.settle()
            if end:
                self._publisher = None
                publisher.close()

    def copy(self) -> None:
        """Let the copy of an open publication begin now."""
        if self.publication is not None:
            self.publication.wanted.set()

    def writable(self) -> None:
        """Wait until no thread reads the weights. Call it before a change."""
        self.copy()
        if self.publication is not None:
            self.publication.copied.wait()

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.model.zero_grad(set_to_none=True)
        self._sums.clear()

    def collect_gradients(self) -> None:
        """After each micro-batch: add the model's gradients to the float32 sums.

        float32 parameters are left out: torch adds their gradients in float32 already.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None or parameter.dtype == torch.float32:
                continue
            if name in self._sums:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradient of every parameter that has one, by name."""
        for name, parameter in self.model.named_parameters():
            gradient = self._sums.get(name, parameter.grad)
            if gradient is not None:
                yield name, gradient

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients (`squares`); NaN when any of them is not finite."""
        total = squares(gradient for _, gradient in self.gradients())
        return math.sqrt(total) if math.isfinite(total) else math.nan

    @torch.no_grad()
    def apply(self, learning_rate: float, scale: float = 1.0) -> None:
        """One update from the gradients times `scale` (for clipping), then round the masters into the model."""
        self.writable()
        parameters, gradients = self.parameters(), dict(self.gradients())
        self.zero_grad()  # each gradient is freed as soon as it is used, and none after the update has ended
        # One parameter at a time: memory holds the copies of one, and with offload the host one gradient.
        for name, master in self.master.items():
            gradient = gradients.pop(name, None)
            # An expert without tokens has no gradient: its moments still decay, the same in every replica.
            gradient = torch.zeros_like(master) if gradient is None else gradient.to(master.device, torch.float32)
            master.grad = gradient if scale == 1.0 else gradient.mul_(scale)
            del gradient
            before = self._served_copy(name, master) if master is parameters[name] else None
            self.optimizer.step(learning_rate, master)
            master.grad = None
            self._serve(name, parameters[name], master, before)
        self.step += 1
        self.updated_at = time.perf_counter()

    @torch.no_grad()
    def balance(self, rows: Tensor, rate: float) -> None:
        """Raise the correction of every expert that got fewer rows than the mean expert of its layer by `rate`, and
        lower that of every busier one (DeepSeek-V3, arXiv 2412.19437; 2408.15664): later versions choose others, and no
        gradient changes. rows: int64 [L, E], routed to each expert of each layer with a mixture."""
        self.writable()
        parameters, first = self.parameters(), self.model.config.dense_layers
        for layer, counts in enumerate(rows, first):
            name = f"layers.{layer}.correction"
            correction = parameters[name].detach()
            before = correction.clone()
            correction.add_(torch.sign(counts.sum() - counts * len(counts)).to(correction), alpha=rate)
            if self.log is not None:
                self.log.note(name, change(before, correction))

    def new_log(self) -> Log:
        """Record undo entries in a new log from now on. Returns the one before, empty where there was none."""
        before, self.log = self.log, Log()
        return before or Log()

    def _served_copy(self, name: str, master: Tensor) -> Tensor | None:
        """The served bits of a master that is served itself; None where no undo entries are recorded."""
        if self.log is None:
            return None
        served = self.served(name, master)
        return served.clone() if served.data_ptr() == master.data_ptr() else served

    def _serve(self, name: str, parameter: Tensor, master: Tensor, before: Tensor | None = None) -> None:
        """Round a master into the model. before: the served bits, where the master itself was served."""
        if master is not parameter:
            before = parameter.detach().clone() if self.log is not None else None
            precision.cast_into(self.model, name, self.model.get_parameter(name), master)
        if self.log is not None and before is not None:
            self.log.note(name, change(before, self.served(name, parameter)))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that an update depends on, by flat name: masters, moments and frozen parameters, for
        checkpoints."""
        out: dict[str, Tensor] = {}
        for name, master in self.master.items():
            out[f"master.{name}"] = master.detach()
            if (moments := self.optimizer.moments.get(master)) is not None:
                out.update(moments.tensors(name))
        for name, parameter in self.parameters().items():
            if name not in self.master:
                out[f"frozen.{name}"] = parameter.detach()
        return out

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, version: int, step: int) -> None:
        """Restore the result of `tensors`. KeyError when one is missing, ValueError when a shape differs."""
        self.writable()
        parameters = self.parameters()
        for name, master in self.master.items():
            saved = tensors[f"master.{name}"]
            if saved.shape != master.shape:
                raise ValueError(f"{name}: the checkpoint has shape {tuple(saved.shape)}, not {tuple(master.shape)}")
            before = self._served_copy(name, master) if master is parameters[name] else None
            master.copy_(saved)
            self._serve(name, parameters[name], master, before)
            self.optimizer.moments.pop(master, None)
            if step:
                self.optimizer.moments[master] = Moments.load(tensors, name, step, master.device)
        for name, parameter in parameters.items():
            if name not in self.master:
                before = parameter.detach().clone() if self.log is not None else None
                parameter.copy_(tensors[f"frozen.{name}"])
                if self.log is not None and before is not None:
                    self.log.note(name, change(before, parameter.detach()))
        self.zero_grad()
        self.version, self.step = version, step


def freeze(model: PolicyModel, patterns: Sequence[str]) -> PolicyModel:
    """The model with the named parameters frozen, and with all but its adapters where it has some. CheckpointError when
    a pattern matches none, or when all are frozen."""
    names = [name for name, _ in model.named_parameters()]
    for name in names if model.config.adapter else ():
        model.get_parameter(name).requires_grad_(low_rank.is_adapter(name))
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise CheckpointError(
                f"[trainer] frozen: {pattern!r} names no parameter; expected patterns over {names[0]}, {names[1]} ..."
            )
        for name in matching:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CheckpointError("[trainer] frozen: no parameter is left to train")
    return model
