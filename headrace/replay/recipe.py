"""What a manifest says about how its step is computed, and the configuration that follows from it.

A step that is executed again, by a restarted trainer or by a replay, is computed as its manifest says and not as the
configuration of that day does: otherwise a changed learning rate would rewrite the past.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.config import Algorithm, Config, Numerics
from headrace.messages.training import StepManifest


def recipe(config: Config) -> dict[str, float | int | str | bool]:
    """Every setting that a step's bits depend on, flat: the `objective` of a manifest."""
    return {
        **msgspec.to_builtins(config.algorithm),
        "micro_tokens": config.trainer.micro_tokens,
        "staleness": config.curriculum.staleness,
        **{
            f"numerics.{name}": value
            for name, value in msgspec.to_builtins(config.numerics).items()
            if value != _PLAIN[name]
        },
    }


_PLAIN = msgspec.to_builtins(Numerics())
"""Left out of a recipe while they are what they always were."""


def under(config: Config, manifest: StepManifest) -> Config:
    """The configuration with the manifest's recipe; what the manifest does not name stays."""
    return changed(config, manifest.objective)


def changed(config: Config, objective: Mapping[str, Any]) -> Config:
    """The configuration with another recipe; names that are no settings of it are ignored."""
    own = {name: value for name, value in objective.items() if name in Algorithm.__struct_fields__}
    head = "numerics."
    known = {name.removeprefix(head): value for name, value in objective.items() if name.startswith(head)}
    limits = {name: value for name, value in known.items() if name in _PLAIN}
    replace = msgspec.structs.replace
    return replace(
        config,
        algorithm=msgspec.convert({**msgspec.to_builtins(config.algorithm), **own}, Algorithm),
        numerics=msgspec.convert({**msgspec.to_builtins(config.numerics), **limits}, Numerics),
        trainer=replace(config.trainer, micro_tokens=int(objective.get("micro_tokens", config.trainer.micro_tokens))),
        curriculum=replace(config.curriculum, staleness=int(objective.get("staleness", config.curriculum.staleness))),
    )
