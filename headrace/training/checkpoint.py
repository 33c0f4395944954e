"""The trainer's memory across a crash: one safetensors file, whole or not at all.

The idea: masters, moments, counters and the kept versions are everything that the next step depends on besides its
manifest, so a trainer that loads them goes on bit-equal to one that was never killed. The file gets its name only
after its bytes are on the disk (fsync, rename, fsync of the folder); a kill at any moment leaves the previous one.

Layout: ``master.*``, ``exp_avg.*``, ``exp_avg_sq.*`` by parameter name, ``kept.<version>.*`` by published name, and the
metadata of safetensors: version, step, a hash over all bits, and whatever position in the streams the caller gives.
With a guard on watch also ``guard.*``, and what it knows besides tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from headrace.training.guard import Guard
from headrace.training.state import TrainerState
from headrace.weights import snapshot
from headrace.weights.state import infos, root, slab_hashes, state_bits

FORMAT = 1


class CheckpointError(Exception):
    """The checkpoint is not whole, or not of this model."""


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds besides the state it restored."""

    kept: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Published tensors of earlier versions, by version."""
    position: Mapping[str, int | str] = field(default_factory=dict)
    """Where in the streams the trainer stood, as the caller wrote it."""
    guard: Guard | None = None
    """What the guard knew, where there was one."""


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
    told, copies = (guard or Guard()).dump()
    tensors.update({f"guard.{name}": value for name, value in copies.items()})
    described, arrays = infos(tensors), state_bits(tensors)
    about = {
        "format": str(FORMAT),
        "version": str(state.version),
        "step": str(state.step),
        "kept": json.dumps(sorted(kept or {})),
        "position": json.dumps(dict(position or {}), sort_keys=True),
        "hash": root(described, slab_hashes(described, arrays)),
    }
    if guard is not None:
        about["guard"] = json.dumps(told)
    with snapshot.Draft(path, described, about) as draft:
        for tensor, array in enumerate(arrays):
            draft.write(tensor, 0, array)
        draft.commit()


def load(path: str | Path, state: TrainerState) -> Checkpoint:
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
        own = {name.removeprefix("guard."): value for name, value in tensors.items() if name.startswith("guard.")}
        guard = Guard.load(json.loads(about["guard"]), own)
    return Checkpoint(kept, json.loads(about["position"]), guard)
