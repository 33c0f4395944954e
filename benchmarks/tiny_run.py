"""The smallest run that has every part: changes to deploy/demo.toml for runs that measure processes, not learning, and
for `--smoke`.

Tests start their runs with the same changes.
"""

import json
from typing import Any

TINY: dict[str, Any] = {
    "environment.backend": "process",
    "policy.dim": 32,
    "policy.layers": 1,
    "policy.heads": 1,
    "mid_training.tokens": 4000,
    "mid_training.processes": 1,
    "curriculum.groups_per_step": 2,
    "curriculum.group_size": 4,
    "limits.max_turns": 2,
    "limits.max_turn_tokens": 16,
    "evaluation.before": False,
    "evaluation.after": False,
    "run.min_free_mb": 64,
}


ACTORS = ("curriculum", "evaluator", "dead_letter", "judge", "rollout", "weight_sender", "weight_receiver")
PRODUCT = ("gateway", "feedback", "scavenger", "rollout:product")


def settings(*alone: str, **more: Any) -> list[str]:
    """The same as entries of `--set`, with more of them: `curriculum__steps=1` is curriculum.steps.

    Two processes run all actors, because half of such a run's time is the start of a process for each. alone: the actor
    that the benchmark runs itself, `environment` or `trainer`; such a run has no product.
    """
    both = [[*ACTORS, "environment", *(PRODUCT if not alone else ())], ["trainer"]]
    groups = [left for group in both if (left := [actor for actor in group if actor not in alone])]
    changes = TINY | {"processes.groups": groups} | {name.replace("__", "."): value for name, value in more.items()}
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]
