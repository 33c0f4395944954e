"""The trainer's checkpoint: one safetensors file, whole or not at all.

The idea: masters, moments, counters and the kept versions are everything that the next step depends on besides its
manifest, so a trainer that loads them goes on bit-equal to one that was never killed. The file gets its name only
after its bytes are on the disk (fsync, rename, fsync of the folder); a kill at any moment leaves the previous one.

Layout: ``master.*``, ``exp_avg.*``, ``exp_avg_sq.*`` by parameter name, ``kept.<version>.*`` by published name, and the
metadata of safetensors: version, step, a hash over all bits, and the position in the streams that the caller gives.
With an active guard also ``guard.*``, and the guard's state besides tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from headrace.training.guard import Guard
from headrace.training.state import TrainerState
from headrace.weights import snapshot
from headrace.weights.state import block_hashes, infos, root, state_bits

FORMAT = 1


class CheckpointError(Exception):
    """The checkpoint is damaged, or of another model."""


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
    """Write the state atomically and durably. OSError when the disk is full: the old file stays."""
    tensors = state.tensors()
    for version, weights in (kept or {}).items():
        tensors.update({f"kept.{version}.{name}": value for name, value in weights.items()})
    facts, copies = (guard or Guard()).dump()
    tensors.update({f"guard.{name}": value for name, value in copies.items()})
    described, arrays = infos(tensors), state_bits(tensors)
    about = {
        "format": str(FORMAT),
        "version": str(state.version),
        "step": str(state.step),
        "kept": json.dumps(sorted(kept or {})),
        "position": json.dumps(dict(position or {}), sort_keys=True),
        "hash": root(described, block_hashes(described, arrays)),
    }
    if guard is not None:
        about["guard"] = json.dumps(facts)
    with snapshot.Draft(path, described, about) as draft:
        for tensor, array in enumerate(arrays):
            draft.write(tensor, 0, array)
        draft.commit()


def load(path: str | Path, state: TrainerState) -> CheckpointContents:
    """Restore a state in place. FileNotFoundError when there is none, CheckpointError when it is broken or foreign."""
    file = snapshot.Snapshot(path)
    about = file.metadata
    if about.get("format") != str(FORMAT):
        raise CheckpointError(f"{path} is not a trainer checkpoint of format {FORMAT}")
    if file.state_hash() != about["hash"]:
        raise CheckpointError(f"{path} does not have the bits that were written")
    tensors = snapshot.read(path)
    try:
        state.restore(tensors, version=int(about["version"]), step=int(about["step"]))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is of another model: {error}") from None
    kept: dict[int, dict[str, Tensor]] = {}
    for version in json.loads(about["kept"]):
        head = f"kept.{version}."
        kept[version] = {name[len(head) :]: value.clone() for name, value in tensors.items() if name.startswith(head)}
    guard = None
    if "guard" in about:
        copies = {name.removeprefix("guard."): value for name, value in tensors.items() if name.startswith("guard.")}
        guard = Guard.load(json.loads(about["guard"]), copies)
    return CheckpointContents(kept, json.loads(about["position"]), guard)
