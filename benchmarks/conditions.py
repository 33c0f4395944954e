"""The last line of every benchmark: one flat JSON object with conditions and targets."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.launch.conditions import Target, at_least, at_most, conditions

Figures = dict[str, Any]
"""The values of one benchmark by name: each has others, so there is no struct for them."""

__all__ = ["Figures", "Target", "at_least", "at_most", "cannot_run", "conditions", "finish"]


def finish(figures: Mapping[str, Any], targets: Mapping[str, Target], *packages: str) -> None:
    """Print the last line: one flat JSON object."""
    last = {**figures, "conditions": conditions(*packages), "targets": dict(targets)}
    print(json.dumps(msgspec.to_builtins(last)))


def cannot_run(why: str) -> None:
    """Print why this machine cannot measure it, and exit with code 2."""
    sys.stderr.write(why + "\n")
    sys.exit(2)
