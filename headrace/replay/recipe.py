"""The settings that a manifest records about its step, and the configuration that follows from them.

A restarted trainer or a replay computes a step with the settings of its manifest and not with those of the present
configuration: otherwise a changed learning rate would change recorded steps.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.config import Algorithm, Config, Mesh, Numerics
from headrace.messages.training import RankLayout, StepManifest

CHANGEABLE = frozenset(
    "learning_rate warmup_steps schedule decay_steps beta2 weight_decay balance_rate tis_clip dual_clip ratio_low "
    "ratio_high minibatches kl_weight grad_clip max_grad_norm guard_k1 guard_patience guard_backoff constant_tokens "
    "sequence_mean overlong".split()
)
"""Settings of [algorithm] that an order may change during a run: none of them decides the shape of a state."""


def refused(config: Config, settings: Mapping[str, Any]) -> str:
    """Why a run cannot take other settings of [algorithm], in one sentence; empty when it can."""
    if other := sorted(set(settings) - CHANGEABLE):
        return f"algorithm.{other[0]} stays as it is during a run; {', '.join(sorted(CHANGEABLE))} may change"
    try:
        new = changed(config, settings).algorithm
    except msgspec.ValidationError as error:
        return f"the settings cannot be used: {error}"
    if new.kl_weight > 0.0 and not config.algorithm.kl_weight:
        return "kl_weight needs the policy of version 0, which a run without it does not hold"
    return ""


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
