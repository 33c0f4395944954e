"""The trainer's checkpoint: one safetensors file, written atomically.

The idea: besides its manifest, the next step depends on masters, moments, counters and the kept versions alone. So a
trainer that loads them continues with the same bits as one that was never killed. The file gets its name only
after its bytes are on the disk (fsync, rename, fsync of the folder); a kill at any moment leaves the previous one.

Layout: ``master.*``, ``exp_avg.*``, ``exp_avg_sq.*`` by parameter name, with moments of eight bits also their scales
``exp_avg_scale.*`` and ``exp_avg_sq_scale.*``, ``kept.<version>.*`` by published name, and the metadata of safetensors:
version, step, the position in the streams that the caller gives, and a hash over all bits and all other metadata.
With an active guard also ``guard.*``, and the guard's state besides tensors.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from headrace.errors import HeadraceError
from headrace.training.guard import Guard
from headrace.training.state import TrainerState
from headrace.weights import snapshot, tensor_state
from headrace.weights.state import WeightError, block_hashes, root
from headrace.weights.tensor_state import infos, state_bits

FORMAT = 2
"""Of new files. Recorded runs have files of format 1, whose hash is that of the bits alone."""


class UnusableCheckpoint(HeadraceError):
    """The checkpoint is damaged, or of another model."""


class Damaged(UnusableCheckpoint):
    """The file is not what was written."""


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a file besides the restored state."""

    kept: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Published tensors of earlier versions, by version."""
    position: Mapping[str, int | str] = field(default_factory=dict)
    """The position in the streams, as the caller wrote it."""
    guard: Guard | None = None
    """The guard, where one was active."""


def save(
    path: str | Path,
    state: TrainerState,
    *,
    kept: Mapping[int, Mapping[str, Tensor]] | None = None,
    position: Mapping[str, int | str] | None = None,
    guard: Guard | None = None,
) -> None:
    """Write the state atomically and durably. OSError when the disk is full; the previous file then stays."""
    tensors = state.tensors()
    for version, weights in (kept or {}).items():
        tensors.update({f"kept.{version}.{name}": value for name, value in weights.items()})
    _, copies = (guard or Guard()).dump()
    tensors.update({f"guard.{name}": value for name, value in copies.items()})
    described, arrays = infos(tensors), state_bits(tensors)
    about = facts(state, sorted(kept or {}), position or {}, guard)
    about["hash"] = digest(about, root(described, block_hashes(described, arrays)))
    with snapshot.Draft(path, described, about) as draft:
        for tensor, array in enumerate(arrays):
            draft.write(tensor, 0, array)
        draft.commit()


def facts(
    state: TrainerState, kept: Sequence[int], position: Mapping[str, int | str], guard: Guard | None
) -> dict[str, str]:
    """The metadata of a checkpoint, without its hash."""
    about = {
        "format": str(FORMAT),
        "version": str(state.version),
        "step": str(state.step),
        "kept": json.dumps(list(kept)),
        "position": json.dumps(dict(position), sort_keys=True),
    }
    if guard is not None:
        about["guard"] = json.dumps(guard.dump()[0])
    return about


def digest(about: Mapping[str, str], bits: str) -> str:
    """The hash of a checkpoint: blake2b over its metadata and the state hash of its bits."""
    if about.get("format") == "1":
        return bits
    lines = [f"{key}={value}" for key, value in sorted(about.items()) if key != "hash"]
    return hashlib.blake2b("\n".join([*lines, bits]).encode(), digest_size=16).hexdigest()


def load(path: str | Path, state: TrainerState) -> CheckpointContents:
    """Restore `state` in place. FileNotFoundError without a file; UnusableCheckpoint when it is damaged or of another
    model."""
    file = opened(path)
    check(path, file.metadata, file.state_hash())
    tensors = tensor_state.read(path)
    try:
        state.restore(tensors, version=int(file.metadata["version"]), step=int(file.metadata["step"]))
    except (KeyError, ValueError) as error:
        raise UnusableCheckpoint(f"{path} is of another model: {error}") from None
    mapped = contents(file.metadata, tensors, lambda _, value: value.clone())
    copies = {
        version: {name: value.clone() for name, value in weights.items()} for version, weights in mapped.kept.items()
    }
    return CheckpointContents(copies, mapped.position, mapped.guard)


def opened(path: str | Path) -> snapshot.Snapshot:
    """The file, whose hash is still to be checked. FileNotFoundError, Damaged."""
    try:
        return snapshot.Snapshot(path)
    except WeightError as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def check(path: str | Path, about: Mapping[str, str], bits: str) -> None:
    """UnusableCheckpoint when a file with this metadata is no checkpoint, Damaged when its hash is another one. bits:
    the state hash of its bits."""
    if about.get("format") not in ("1", str(FORMAT)):
        raise UnusableCheckpoint(f"{path} is not a trainer checkpoint of a format up to {FORMAT}")
    if digest(about, bits) != about.get("hash"):
        raise Damaged(f"{path} is damaged: it gives hash {digest(about, bits)}, expected {about.get('hash')}")


def contents(
    about: Mapping[str, str], tensors: Mapping[str, Tensor], copy: Callable[[str, Tensor], Tensor]
) -> CheckpointContents:
    """The contents of a file besides the state. Tensors of kept versions stay mapped; copy: copies a guard's tensor."""
    by_version: dict[int, dict[str, Tensor]] = {}
    for version in json.loads(about["kept"]):
        head = f"kept.{version}."
        by_version[version] = {name[len(head) :]: value for name, value in tensors.items() if name.startswith(head)}
    guard = None
    if "guard" in about:
        copies = {
            name.removeprefix("guard."): copy(name, value)
            for name, value in tensors.items()
            if name.startswith("guard.")
        }
        guard = Guard.load(json.loads(about["guard"]), copies)
    return CheckpointContents(by_version, json.loads(about["position"]), guard)
