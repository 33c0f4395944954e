"""Earlier versions of the served weights, kept as the differences from one version to the next.

The idea: the trainer scores sampled tokens again with the versions that sampled them (Law 5), so it needs the last
`bound` versions. A copy of the model for each would need as much memory as the model. Instead the state logs every
write to the served weights as an undo entry: the positions that changed and the values before. In bfloat16 at the
learning rates of reinforcement learning about one weight in a hundred changes. A requested version is rebuilt from a
copy of the current weights by undoing the entries since, newest first, and is freed after the measurement.

Trade-off: float32 weights all change with every update, so their entries are whole tensors and save nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.policy.adapters import low_rank
from headrace.policy.model import Model

_SPARSE = 1 / 4
"""Above this share of changed elements the whole tensor is stored: a position is up to four times as large as an
element."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """The values of one parameter before a write."""

    positions: Tensor | None
    """int32 or int64 [M], flat; None when `before` is the whole parameter."""
    before: Tensor


Log = list[tuple[str, Change]]
"""Undo entries in the order of the writes: the parameter's name and its change."""


def change(before: Tensor, after: Tensor) -> Change | None:
    """The undo entry of a write; None when no bit changed. Tensors of one shape; bits are compared, not values."""
    old, new = before.reshape(-1), after.reshape(-1)
    kind = _INTEGERS[old.element_size()]
    differs = old.view(kind) != new.view(kind)
    count = int(torch.count_nonzero(differs))
    if not count:
        return None
    if count > _SPARSE * old.numel():  # known before the positions are made: they have twice the bytes of the weights
        return Change(None, before)
    positions = differs.nonzero().view(-1)
    narrow = positions if old.numel() > 2**31 - 1 else positions.int()
    return Change(narrow, old.index_select(0, positions))


@torch.no_grad()
def undo(model: Model, log: Log) -> None:
    """Undo the writes of a log, newest first, in place."""
    parameters = dict(model.named_parameters())
    for name, (positions, before) in reversed(log):
        if positions is None:
            parameters[name].copy_(before)
        else:
            parameters[name].view(-1).index_copy_(0, positions.long(), before)


class Versions(Mapping[int, Model]):
    """The weights of the current version and of the earlier ones that are kept, by version.

    Rebuilt versions stay in memory until `release`.
    """

    def __init__(self, model: Model, version: int) -> None:
        """model: the current weights, which change in place; version: their number."""
        self._model, self._current = model, version
        self._logs: dict[int, Log] = {}
        """Version to the writes that led from it to the next kept version."""
        self._rebuilt: dict[int, Model] = {}

    def advance(self, version: int, log: Log) -> None:
        """Record that the current weights are `version`. log: the writes since the version before. Frees rebuilt
        versions."""
        self.release()
        self._logs[self._current] = log
        self._current = version

    def restore(self, version: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Add an older version from a checkpoint. before: its parameters; after: those of the next newer kept
        version."""
        entries = ((name, change(before[name].detach(), after[name].detach())) for name in before)
        self._logs[version] = [(name, entry) for name, entry in entries if entry is not None]

    def keep(self, oldest: int) -> list[Log]:
        """Discard the versions before `oldest`. Returns their undo entries: the caller decides when they are freed."""
        return [self._logs.pop(version) for version in self.earlier if version < oldest]

    def release(self) -> None:
        """Free the memory of rebuilt versions."""
        self._rebuilt.clear()

    @property
    def earlier(self) -> list[int]:
        """The kept versions without the current one, ascending."""
        return sorted(self._logs)

    @property
    def nbytes(self) -> int:
        """Bytes of the undo entries."""
        tensors = (tensor for log in self._logs.values() for _, entry in log for tensor in entry if tensor is not None)
        return sum(tensor.nbytes for tensor in tensors)

    def __getitem__(self, version: int) -> Model:
        if version == self._current:
            return self._model
        if version not in self._logs:
            raise KeyError(version)
        if version not in self._rebuilt:
            later = min(v for v in (*self._logs, self._current) if v > version)
            model = copy.deepcopy(self[later])
            undo(model, self._logs[version])
            self._rebuilt[version] = model
        return self._rebuilt[version]

    def __iter__(self) -> Iterator[int]:
        yield from (*self.earlier, self._current)

    def __len__(self) -> int:
        return len(self._logs) + 1


def adapters(model: Model) -> dict[str, Tensor]:
    """The model's adapters under their published names."""
    return {name: value for name, value in model.state().items() if low_rank.is_published(name)}


def trained(model: Model) -> dict[str, Tensor]:
    """The published tensors in which versions can differ: all of them, or the adapters."""
    return adapters(model) if model.config.adapter else model.state()
