"""The last line of every benchmark: one flat JSON object with conditions and targets."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from headrace.launch.conditions import Figures, at_least, at_most, conditions

__all__ = ["Figures", "at_least", "at_most", "cannot_run", "conditions", "finish"]


def finish(figures: Mapping[str, Any], targets: Mapping[str, Figures], *packages: str) -> None:
    """Print the last line: one flat JSON object."""
    print(json.dumps({**figures, "conditions": conditions(*packages), "targets": dict(targets)}))


def cannot_run(why: str) -> None:
    """Print why this machine cannot measure it, and exit with code 2."""
    sys.stderr.write(why + "\n")
    sys.exit(2)
