"""The settings that a manifest records about its step, and the configuration that follows from them.

A restarted trainer or a replay computes a step with the settings of its manifest and not with those of the present
configuration: otherwise a changed learning rate would change recorded steps.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.config import Algorithm, Config, Mesh, Numerics
from headrace.messages.training import RankLayout, StepManifest


def recipe(config: Config) -> dict[str, float | int | str | bool]:
    """Every setting on which a step's bits depend, in one struct: the `objective` of a manifest."""
    return {
        **_scalars(config.algorithm),
        "micro_tokens": config.trainer.micro_tokens,
        "staleness": config.curriculum.staleness,
        # A GPU and its host may round AdamW otherwise.
        **({"offload": config.trainer.offload} if config.trainer.offload != "none" else {}),
        **{
            f"numerics.{name}": value
            for name, value in msgspec.to_builtins(config.numerics).items()
            if value != _PLAIN[name]
        },
    }


def in_layout(config: Config, layout: RankLayout | None = None) -> Config:
    """The configuration with the processes of a manifest, all of them on this machine; None: one process."""
    mesh = Mesh()
    if layout is not None:
        mesh = Mesh(
            replicate=layout.nodes,
            shard=layout.ranks // layout.nodes,
            expert=layout.expert_ranks,
            context=layout.context_ranks,
        )
    return msgspec.structs.replace(
        config, trainer=msgspec.structs.replace(config.trainer, mesh=mesh, node_ranks=0, rendezvous="")
    )


def _scalars(algorithm: Algorithm) -> dict[str, float | int | str | bool]:
    """The settings of the objective, without a reward's options: a step reads rewards from its scores."""
    values = msgspec.to_builtins(algorithm)
    return {name: value for name, value in values.items() if isinstance(value, float | int | str | bool)}


_PLAIN = msgspec.to_builtins(Numerics())
"""Default values. A recipe leaves out the settings that have them."""


def under(config: Config, manifest: StepManifest) -> Config:
    """The configuration with the manifest's recipe; settings that the manifest does not name stay."""
    return changed(config, manifest.objective)


def changed(config: Config, objective: Mapping[str, Any]) -> Config:
    """The configuration with another recipe; names that are no settings of it are ignored."""
    algorithm = {name: value for name, value in objective.items() if name in Algorithm.__struct_fields__}
    head = "numerics."
    numerics = {name.removeprefix(head): value for name, value in objective.items() if name.startswith(head)}
    limits = {name: value for name, value in numerics.items() if name in _PLAIN}
    replace = msgspec.structs.replace
    return replace(
        config,
        algorithm=msgspec.convert({**msgspec.to_builtins(config.algorithm), **algorithm}, Algorithm),
        numerics=msgspec.convert({**msgspec.to_builtins(config.numerics), **limits}, Numerics),
        trainer=replace(
            config.trainer,
            micro_tokens=int(objective.get("micro_tokens", config.trainer.micro_tokens)),
        ),
        curriculum=replace(config.curriculum, staleness=int(objective.get("staleness", config.curriculum.staleness))),
    )
