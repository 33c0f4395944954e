"""Earlier versions of the served weights, kept as the differences from one version to the next.

The idea: the trainer scores sampled tokens again with the versions that sampled them (Law 5), so it needs the last
`bound` versions. A copy of the model for each would need as much memory as the model. Instead the state logs every
write to the served weights as an undo entry: the positions that changed and the differences that lead back, as the
delta operators find them on the weights' own device. In bfloat16 at the learning rates of reinforcement learning about
one weight in a hundred changes. A requested version is rebuilt from the current weights by applying the entries since,
newest first, and is freed after the measurement. It shares every tensor that did not change.

Trade-off: float32 weights all change with every update, so their entries are whole tensors and save nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headrace.kernels import operators
from headrace.policy.adapters import low_rank
from headrace.policy.seam import PolicyModel

_SPARSE = 1 / 4
"""Above this share of changed elements the whole tensor is stored: a position is up to four times as large as an
element."""
_PIECE = 2**25
"""Elements that are compared at once: the operator needs up to six bytes of scratch for each."""
_SAMPLE, _LARGE = 2048, 2**17
"""Elements that tell, before all of a tensor with at least so many are compared, whether it changed as a whole."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Element size to the integers whose differences the operators take."""
_STORED = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
"""Element size to the dtype of stored differences, which are not negative below 32 bits."""


class WeightChange(NamedTuple):
    """How one parameter gets its values before a write back."""

    positions: Tensor | None
    """int32 or int64 [M], flat, ascending; None when `values` is the whole parameter."""
    values: Tensor
    """Zig-zag differences [M] from the bits after the write to those before, as wide as an element; or the parameter
    before the write."""


class Log:
    """Undo entries in the order of the writes."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, WeightChange]] = []
        """A parameter's name and its change."""
        self._whole: set[str] = set()
        """The parameters of which an entry has the whole tensor, which replaces what undoing later writes gives."""

    def note(self, name: str, entry: WeightChange | None) -> None:
        """Append the entry of a write, if it is needed. None: the write changed no bit."""
        if entry is None or name in self._whole:
            return
        self.entries.append((name, entry))
        if entry.positions is None:
            self._whole.add(name)


def change(before: Tensor, after: Tensor) -> WeightChange | None:
    """The undo entry of a write; None when no bit changed. Tensors of one shape; bits are compared, not values.

    The delta operators know elements of 1, 2 and 4 bytes; a tensor of 8-byte elements is stored whole.
    """
    size, count = before.element_size(), before.numel()
    if size not in _BITS:
        same = torch.equal(before.reshape(-1).view(torch.int64), after.reshape(-1).view(torch.int64))
        return None if same else WeightChange(None, before)
    old, new = (tensor.reshape(-1).view(_BITS[size]) for tensor in (before, after))
    few = int(_SPARSE * count)
    if _most(old, new):
        return WeightChange(None, before)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, count, _PIECE):
        part = slice(start, start + _PIECE)
        at, folded = operators.changes(new[part], old[part])
        few -= len(at)
        if few < 0:
            return WeightChange(None, before)
        if len(at):
            at = (at + start if start else at).to(torch.int32 if count < 2**31 else torch.int64)
            parts.append((at, folded.to(_STORED[size])))
    if len(parts) > 1:
        return WeightChange(*(torch.cat(each) for each in zip(*parts, strict=True)))
    return WeightChange(*parts[0]) if parts else None


def _most(old: Tensor, new: Tensor) -> bool:
    """Whether more than the stored share of a large tensor changed; a sample tells whether to count. Finding the
    differences of such a tensor would take longer than storing it."""
    steps = (len(old) // _SAMPLE, 1) if len(old) >= _LARGE else ()
    return bool(steps) and all(_changed(old[::step], new[::step]) > _SPARSE for step in steps)


def _changed(old: Tensor, new: Tensor) -> float:
    """The share of elements that differ."""
    return int(torch.count_nonzero(old != new)) / len(old)


@torch.no_grad()
def undo(parameters: Mapping[str, Tensor], log: Log) -> dict[str, Tensor]:
    """The tensors that the writes of a log changed, by name, as they were before. parameters: as they are after it.

    Do not write to the results: one may be the entry's own tensor.
    """
    out: dict[str, Tensor] = {}
    for name, entry in reversed(log.entries):
        out[name] = _undone(out[name] if name in out else parameters[name].detach(), entry)
    return out


def _undone(after: Tensor, entry: WeightChange) -> Tensor:
    if entry.positions is None:
        return entry.values
    bits = after.reshape(-1).view(_BITS[after.element_size()])
    back = operators.apply_changes(bits, entry.positions.long(), entry.values.int())
    return back.view(after.dtype).view(after.shape)


def _replaced(model: PolicyModel, tensors: Mapping[str, Tensor]) -> PolicyModel:
    """A copy of a model with other tensors for some parameters, by name. It shares all the others: they are not
    copied."""
    memo: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        new = tensors.get(name)
        memo[id(parameter)] = parameter if new is None else nn.Parameter(new, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


class Versions(Mapping[int, PolicyModel]):
    """The weights of the current version and of the earlier ones that are kept, by version.

    Rebuilt versions stay in memory until `release`. They share tensors with the current weights: release them before
    the next update.
    """

    def __init__(self, model: PolicyModel, version: int) -> None:
        """model: the current weights, which change in place; version: their number."""
        self._model, self._current = model, version
        self._logs: dict[int, Log] = {}
        """Version to the writes that led from it to the next kept version."""
        self._rebuilt: dict[int, PolicyModel] = {}

    def advance(self, version: int, log: Log) -> None:
        """Record that the current weights are `version`. log: the writes since the version before. Frees rebuilt
        versions."""
        self.release()
        self._logs[self._current] = log
        self._current = version

    def restore(self, version: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Add an older version from a checkpoint. before: its parameters; after: those of the next newer kept
        version."""
        self._logs[version] = log = Log()
        for name in before:
            log.note(name, change(before[name].detach(), after[name].detach()))

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
        entries = (entry for log in self._logs.values() for _, entry in log.entries)
        return sum(tensor.nbytes for entry in entries for tensor in entry if tensor is not None)

    def __getitem__(self, version: int) -> PolicyModel:
        if version == self._current:
            return self._model
        if version not in self._logs:
            raise KeyError(version)
        if version not in self._rebuilt:
            later = min(v for v in (*self._logs, self._current) if v > version)
            newer = self[later]
            self._rebuilt[version] = _replaced(newer, undo(dict(newer.named_parameters()), self._logs[version]))
        return self._rebuilt[version]

    def __iter__(self) -> Iterator[int]:
        yield from (*self.earlier, self._current)

    def __len__(self) -> int:
        return len(self._logs) + 1


def adapters(model: PolicyModel) -> dict[str, Tensor]:
    """The model's adapters under their published names."""
    return {name: value for name, value in model.state().items() if low_rank.is_published(name)}


def trained(model: PolicyModel) -> dict[str, Tensor]:
    """The published tensors in which versions can differ: all of them, or the adapters."""
    return adapters(model) if model.config.adapter else model.state()
