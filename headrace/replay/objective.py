"""Takes a recorded step under another objective and compares the results: the same state and records, another recipe.

Both steps start from one checkpoint, which is written at the step, so they start from the same bits. Only settings of
the recipe that a manifest records may be changed; another key would have no effect, or would change the run itself.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.config import Config, parse
from headrace.policy.seam import PolicyModel
from headrace.replay.recipe import recipe
from headrace.replay.recorded_run import ReplayError
from headrace.replay.step import Loaded, Rerun, attempt, compare
from headrace.training.trainer import PolicyTrainer

WHOLE = ("algorithm", "numerics")
"""Sections of the configuration that are part of the recipe."""
SINGLE = (("trainer", "micro_tokens"), ("curriculum", "staleness"))


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `headrace replay RUN --step N --with ...` prints; fields with `_with` are of the other
    objective."""

    step: int
    changed: dict[str, float | int | str | bool]
    bitwise_equal: bool
    """Whether the step under its own objective gave the published bits. If not, the comparison is not about the run's
    weights. Both steps are taken in one process, so it is false for a step of several ranks."""
    loss: float
    loss_with: float
    grad_norm: float
    grad_norm_with: float
    update_norm: float
    """Euclidean norm of the step's update of the served weights."""
    update_norm_with: float
    weight_delta_norm: float
    """Euclidean norm between the two results."""
    changed_share: float
    """Share of served weights that differ between the two results."""
    weights_hash: str
    weights_hash_with: str
    failed: str
    failed_with: str


def other(config: Config, entries: Sequence[str]) -> tuple[Config, dict[str, float | int | str | bool]]:
    """The configuration with ``section.key=value`` changed, and the recipe's new values. ConfigError, ReplayError."""
    parsed, new = parse("", "--with", entries), config
    for entry in entries:
        section, _, key = entry.partition("=")[0].strip().partition(".")
        if section not in WHOLE and (section, key) not in SINGLE:
            raise ReplayError(
                f"{section}.{key} does not change a step; {', '.join(f'{name}.*' for name in WHOLE)}, "
                f"{' and '.join('.'.join(pair) for pair in SINGLE)} do"
            )
        value = getattr(getattr(parsed, section), key)
        replaced = msgspec.structs.replace(getattr(new, section), **{key: value})
        new = msgspec.structs.replace(new, **{section: replaced})
    before, after = recipe(config), recipe(new)
    changed = {name: after.get(name, "default") for name in (*before, *after) if before.get(name) != after.get(name)}
    if not changed:
        raise ReplayError(f"{', '.join(entries)} does not change the recipe of the step")
    return new, changed


async def differ(rerun: Rerun, step: int, entries: Sequence[str]) -> Difference:
    """Take a step under its own objective and under another one. ReplayError, ConfigError."""
    loaded = await rerun.reach(step, alone=True)
    config, changed = other(loaded.trainer.config, entries)
    return await asyncio.to_thread(_differ, rerun, loaded, config, changed)


def twin(rerun: Rerun, loaded: Loaded, config: Config) -> Loaded:
    """The same checkpoint and records under another configuration. ReplayError."""
    loaded.trainer.save({})
    second = rerun.open(loaded.trainer.folder / "checkpoint.safetensors")
    second.config = config
    if config.algorithm.kl_weight > 0.0 and second.reference is None:
        second.reference = _reference(rerun, second)
    return loaded._replace(trainer=second)


def _reference(rerun: Rerun, like: PolicyTrainer) -> PolicyModel:
    """The policy of version 0. ReplayError when its checkpoint is not kept."""
    if 0 not in rerun.recorded.checkpoints:
        raise ReplayError("kl_weight needs the policy of version 0 as its reference, and its checkpoint is not kept")
    first = rerun.open(Path(rerun.recorded.checkpoints[0]))
    return first.state.model


def _differ(rerun: Rerun, loaded: Loaded, config: Config, changed: dict[str, float | int | str | bool]) -> Difference:
    second = twin(rerun, loaded, config)
    before = {name: value.clone() for name, value in loaded.trainer.state.published().items()}
    recorded, new = attempt(loaded), attempt(second)
    weights, weights_with = loaded.trainer.state.published(), second.trainer.state.published()
    return Difference(
        step=loaded.manifest.step,
        changed=changed,
        bitwise_equal=compare(loaded, recorded).bitwise_equal,
        loss=recorded.loss,
        loss_with=new.loss,
        grad_norm=recorded.grad_norm,
        grad_norm_with=new.grad_norm,
        update_norm=distance(before, weights),
        update_norm_with=distance(before, weights_with),
        weight_delta_norm=distance(weights, weights_with),
        changed_share=share(weights, weights_with),
        weights_hash=recorded.state_hash,
        weights_hash_with=new.state_hash,
        failed=recorded.failed,
        failed_with=new.failed,
    )


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two sets of weights, summed in float64."""
    return math.sqrt(sum(float(torch.sum((two[name].double() - one[name].double()) ** 2)) for name in one))


def share(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Share of the weights that differ, from 0 to 1."""
    unequal = sum(int((one[name] != two[name]).sum()) for name in one)
    return unequal / max(1, sum(value.numel() for value in one.values()))
