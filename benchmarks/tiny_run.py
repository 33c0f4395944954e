"""The smallest run that has every part: changes to deploy/demo.toml for runs that measure processes, not learning.

Tests start their runs with the same changes.
"""

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
