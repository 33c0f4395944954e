"""Prints the last line of every benchmark: one flat JSON object with figures, conditions and targets."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.metrics.conditions import Target, at_least, at_most, conditions

Figures = dict[str, Any]
"""The values of one benchmark by name. Every benchmark has its own names, so there is no struct for them."""

__all__ = ["Figures", "Target", "at_least", "at_most", "cannot_run", "conditions", "finish"]


def finish(figures: Mapping[str, Any], targets: Mapping[str, Target], *packages: str) -> None:
    """Print the last line: one flat JSON object."""
    last = {**figures, "conditions": conditions(*packages), "targets": dict(targets)}
    print(json.dumps(msgspec.to_builtins(last)))


def cannot_run(why: str) -> None:
    """Print the reason for which this machine cannot run the benchmark, and exit with code 2."""
    sys.stderr.write(why + "\n")
    sys.exit(2)
