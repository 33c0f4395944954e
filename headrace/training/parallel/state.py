"""The part of a trainer's state that a process of a group holds: its rows of masters, moments and gradients."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.algorithms.adamw import AdamW, OptimizerSettings
from headrace.kernels import mxfp8, operators
from headrace.messages.weights import TensorInfo
from headrace.policy.adapters import low_rank
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import initial
from headrace.policy.provider import keeps_dtype
from headrace.training import checkpoint
from headrace.training.parallel import published, rows
from headrace.training.parallel.group import ProcessGroup
from headrace.training.parallel.interface import Peers
from headrace.training.parallel.sharding import OWNED, ShardedModel
from headrace.training.served.publication import Contents, Publication
from headrace.training.served.runs import Reader, ServedRun
from headrace.training.state import TrainerState, squares
from headrace.weights import tensor_state
from headrace.weights.state import root


class ShardedState(TrainerState):
    """`TrainerState` over shards. Every process must call `gradient_norm`, and `hash` after a change."""

    def __init__(
        self, sharded: ShardedModel, world: ProcessGroup, *, version: int = 0, settings: OptimizerSettings | None = None
    ) -> None:
        """A fresh optimizer over this process's rows."""
        self.sharded, self.world = sharded, world
        self._hash = ""
        self.block_hashes = b""
        """Hashes of the published blocks, 16 bytes each, computed by the last `hash`."""
        self._masters_aside: dict[str, Tensor] = {}
        self._moving = threading.Lock()
        """Held while masters are moved and while a piece of them is read, so that a thread can read them meanwhile."""
        self._contents: Contents | None = None
        super().__init__(sharded.model, version=version, settings=settings)

    def parameters(self) -> dict[str, Tensor]:
        """This process's rows, by parameter; they are the masters."""
        return dict(self.sharded.local)

    def _masters(self) -> dict[str, Tensor]:
        parameters = self.sharded.parameters
        return {name: rows for name, rows in self.sharded.local.items() if parameters[name].requires_grad}

    def served(self, name: str, parameter: Tensor) -> Tensor:
        """These rows as they are served: rounded to the policy's dtype, experts to their grid."""
        return as_served(self.model.config, name, parameter.detach())

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This process's rows of every gradient, by name."""
        for name, parameter in self.sharded.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                yield name, gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def gradient_norm(self) -> float:
        """Euclidean norm over all rows of all gradients; the same number in every process."""
        local = squares(gradient for _, gradient in self.gradients())
        total = sum(self.world.gathered(local, float)[: self.world.dims.shard])  # in every copy the numbers of copy 0
        return math.sqrt(total) if math.isfinite(total) else math.nan

    @torch.no_grad()
    def apply(self, learning_rate: float, scale: float = 1.0) -> None:
        """As TrainerState, for this process's rows."""
        self.sharded.reshard()
        super().apply(learning_rate, scale)
        self._hash = ""

    def balance(self, rows: Tensor, rate: float) -> None:
        """As TrainerState; every process holds all corrections and makes the same change."""
        super().balance(rows, rate)
        self._hash = ""

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, version: int, step: int) -> None:
        """As TrainerState; `tensors` has this process's rows."""
        self.sharded.reshard()
        super().restore(tensors, version=version, step=step)
        self._hash = ""

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """The random weights of a new policy with this seed, as they are served: this process's rows of them. It holds
        one whole parameter at a time."""
        self._take(initial.values(self.model.config, self.sharded.shapes, seed))

    @torch.no_grad()
    def adapt(self, seed: int) -> None:
        """New adapters with this seed: this process's rows of them."""
        self._take(low_rank.initial(self.sharded.shapes, seed))

    def _take(self, values: Iterable[tuple[str, Tensor]]) -> None:
        for name, whole in values:
            held = self.sharded.local[name]
            start = self.sharded.start[name]
            if held.numel():
                part = whole.reshape(-1)[start : start + held.numel()].view(held.shape).to(held.device)
                held.copy_(as_served(self.model.config, name, part))
        self._hash = ""

    @torch.no_grad()
    def begin(self, settings: OptimizerSettings) -> None:
        """Version 0: the weights as they are served, with a fresh optimizer."""
        self.sharded.reshard()
        for name, held in self.sharded.local.items():
            if held.numel():
                held.copy_(self.served(name, held))
        self.optimizer = AdamW(self.master, settings)
        self.step, self.updated_at, self._hash = 0, None, ""
        self.new_log()

    def published(self) -> dict[str, Tensor]:
        """Raises TypeError: no process holds whole tensors."""
        raise TypeError("a sharded state has no whole tensors; write it with parallel.rows and read the file")

    def current(self, name: str) -> Tensor:
        """This process's rows of a parameter's masters, also while the shards hold another version."""
        return self._masters_aside.get(name, self.sharded.local[name])

    @torch.no_grad()
    def show(self, rows: Mapping[str, Tensor]) -> None:
        """Put another version's rows into the shards, and keep the masters aside."""
        self.sharded.reshard()
        for name, tensor in self.sharded.local.items():
            if name not in self._masters_aside:
                copy = tensor.clone()
                with self._moving:
                    self._masters_aside[name] = copy
            tensor.copy_(rows[name])

    @torch.no_grad()
    def put_back(self) -> None:
        """Put the masters back into the shards."""
        if not self._masters_aside:
            return
        self.sharded.reshard()
        for name, tensor in self.sharded.local.items():
            tensor.copy_(self._masters_aside[name])
            with self._moving:
                del self._masters_aside[name]

    def contents(self) -> Contents:
        """As TrainerState: this process's runs."""
        if self._contents is None:
            described = published.infos(self.model.config, self.sharded.shapes)
            self._contents = Contents(described, self.runs())
        return self._contents

    def publish(self, folder: Path) -> Publication:
        """As TrainerState. Only copy 0 writes a file."""
        return Publication.existing(folder, "") if self.world.copy else super().publish(folder)

    def peers(self) -> Peers:
        """As TrainerState."""
        return self.world.aside

    def runs(self, source: Mapping[str, Tensor] | None = None) -> list[ServedRun]:
        """This process's part of the published tensors; source: served rows of another version."""
        reads = {name: self._reader(name) for name in self.sharded.local} if source is None else _readers(source)
        return published.runs(self.model.config, self.sharded, reads, self.world.place)

    def _reader(self, name: str) -> Reader:
        """Elements of this process's rows as they are served; cast piece by piece, so no second copy is made."""
        config = self.model.config

        def read(start: int, count: int) -> Tensor:
            with self._moving:
                piece = self.current(name).reshape(-1)[start : start + count]
                served = as_served(config, name, piece)
                return served.clone() if served.data_ptr() == piece.data_ptr() else served

        return read

    def hash(self) -> str:
        """State hash of the published bytes, cached until they change."""
        if not self._hash:
            described = published.infos(self.model.config, self.sharded.shapes)
            self.block_hashes = rows.hashes(described, self.runs(), self.world.holders)
            self._hash = self.world.agree(root(described, self.block_hashes), "policy")
        return self._hash

    def whole(self, tensors: Mapping[str, Tensor]) -> tuple[list[TensorInfo], list[ServedRun]]:
        """Tensors of a checkpoint, of which this process has rows: descriptions of the whole ones, and its rows."""
        described: list[TensorInfo] = []
        parts: list[ServedRun] = []
        for name, tensor in tensors.items():
            parameter = _parameter(name, self.sharded.shapes)
            shape, start = self.sharded.shapes[parameter], self.sharded.start[parameter]
            if len(shape) > 1:  # scales of moments have shorter rows
                start = start // shape[-1] * tensor.shape[-1]
                shape = (*shape[:-1], tensor.shape[-1])
            described += tensor_state.infos({name: torch.empty(shape, dtype=tensor.dtype, device="meta")})
            replicated = tensor.numel() == torch.Size(shape).numel()
            if tensor.numel() and not (replicated and self.world.place):
                parts.append(_run(name, start, tensor.reshape(-1)))
        return described, parts

    def write(
        self, file: Path, described: Sequence[TensorInfo], parts: Sequence[ServedRun], about: dict[str, str]
    ) -> None:
        """Replace a checkpoint durably. All processes call it; copy 0 writes. about: its metadata, without the hash.
        OSError in every process when one of them cannot write."""
        described = sorted(described, key=lambda info: info.name)
        bits = root(described, rows.hashes(described, parts, self.world.holders))
        about = about | {"hash": self.world.agree(checkpoint.digest(about, bits), "checkpoint")}
        why = ""
        if self.world.copy == 0:
            try:
                rows.write(file, described, about, parts, self.world.holders)
            except OSError as error:
                why = str(error)
        if errors := [text for text in self.world.gathered(why, str) if text]:
            raise OSError(errors[0])

    def source(self, file: Path) -> rows.RowSource | None:
        """A checkpoint, of which this process takes its rows; None where copy 0 sends them. CheckpointError."""
        return rows.RowSource(file, self._cut, self.world.holders) if self.world.copy == 0 else None

    def read(self, file: Path, source: rows.RowSource | None) -> Mapping[str, str]:
        """Restore the state of a checkpoint, from its `source`; returns its metadata. All processes call it.
        CheckpointError."""

        def mine() -> tuple[dict[str, str], dict[str, Tensor]]:
            assert source is not None
            return dict(source.about), source.rows("state")

        try:
            about, plain = self.world.copied(mine, dict[str, str])
            self.restore(plain, version=int(about["version"]), step=int(about["step"]))
        except (KeyError, ValueError) as error:
            raise checkpoint.UnusableCheckpoint(f"{file} is of another model: {error}") from None
        return about

    def rows_of(self, name: str) -> Tensor:
        """This process's rows of the parameter that a checkpoint's tensor belongs to."""
        return self.sharded.local[_parameter(f".{name}", self.sharded.shapes)]

    def _cut(self, info: TensorInfo) -> tuple[int, tuple[int, ...]]:
        """This process's first item of a tensor of the checkpoint, and the shape of its part."""
        parameter = _parameter(info.name, self.sharded.shapes)
        last = len(info.shape) - (1 if "_scale." in info.name.removesuffix(parameter) else 0)
        if tuple(info.shape[:last]) != self.sharded.shapes[parameter][:last]:
            raise ValueError(f"{info.name} has shape {info.shape}, not {self.sharded.shapes[parameter]}")
        held, width = self.rows_of(info.name), self.sharded.shapes[parameter][-1]
        if len(info.shape) == 1:
            return self.sharded.start[parameter], tuple(held.shape)
        return self.sharded.start[parameter] // width * info.shape[-1], (*held.shape[:-1], info.shape[-1])


def _run(name: str, start: int, flat: Tensor) -> ServedRun:
    return ServedRun(name, start, flat.numel(), lambda first, count: tensor_state.bits(flat[first : first + count]))


def _parameter(name: str, shapes: Mapping[str, Any]) -> str:
    """The parameter of a checkpoint's tensor: the longest parameter name that the tensor's name ends with."""
    parts = name.split(".")
    for start in range(1, len(parts)):
        if (rest := ".".join(parts[start:])) in shapes:
            return rest
    raise KeyError(name)


def _readers(source: Mapping[str, Tensor]) -> dict[str, Reader]:
    def reader(flat: Tensor) -> Reader:
        return lambda start, count: flat[start : start + count]

    return {name: reader(tensor.reshape(-1)) for name, tensor in source.items()}


def on_grid(config: PolicyConfig, name: str) -> bool:
    """Whether a parameter, by our name, holds experts that are served in eight bits."""
    if config.expert_format != "mxfp8" or not name.startswith("layers."):
        return False
    _, layer, kind = name.split(".")
    return kind in OWNED and config.sparse(int(layer))


def as_served(config: PolicyConfig, name: str, values: Tensor) -> Tensor:
    """Values of a parameter (whole blocks) rounded as they are served; corrections of routers are not rounded."""
    if keeps_dtype(config, name):
        return values
    served = values.to(config.torch_dtype)
    if on_grid(config, name):
        served = operators.rounded(served.reshape(-1, mxfp8.BLOCK)).reshape(served.shape)
    return served
