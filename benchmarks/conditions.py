"""The common parts of all benchmarks: arguments, `--smoke`, conditions, and the schema of the last line.

The last line of a benchmark is one flat JSON object: `Line` and the benchmark's own figures. With `--smoke` the real
parts run as small as they can, within ten seconds on two quiet cores; the figures then mean nothing, and no result is
written. `tests/benchmarks` runs every benchmark so and reads its last line by `Line`.
"""

import argparse
import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.metrics.conditions import Conditions, Target, at_least, at_most, conditions

Figures = dict[str, Any]
"""The values of one benchmark by name. Every benchmark has its own names, so there is no struct for them."""

__all__ = [
    "Figures",
    "Line",
    "Target",
    "arguments",
    "at_least",
    "at_most",
    "cannot_run",
    "conditions",
    "finish",
    "scratch",
    "smoke",
]


class Line(msgspec.Struct, kw_only=True):
    """The last line without the figures: conditions have load, commit and date."""

    benchmark: str
    """Its module."""
    smoke: bool
    conditions: Conditions
    targets: dict[str, Target]


def smoke() -> bool:
    """Whether this call only checks that the benchmark runs."""
    return "--smoke" in sys.argv


def arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **small: object
) -> argparse.Namespace:
    """The arguments of a call. small: those of `--smoke`, which take the place of what was given."""
    parser.add_argument(
        "--smoke", action="store_true", help="check within 10 s that the benchmark runs; measure nothing"
    )
    args = parser.parse_args(argv)
    for name, value in small.items() if args.smoke else ():
        if not hasattr(args, name):
            raise AttributeError(f"{parser.prog} has no argument {name}")
        setattr(args, name, value)
    return args


def scratch() -> str:
    """With `--smoke` a new folder for runs, which is deleted at the end of the process; otherwise empty."""
    if not smoke():
        return ""
    folder = tempfile.mkdtemp(prefix="headrace-smoke-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def finish(figures: Mapping[str, Any], targets: Mapping[str, Target], *packages: str) -> Figures:
    """Print the last line, and return it. packages: those whose versions it names."""
    module = sys.modules["__main__"].__spec__
    line = Line(
        benchmark=module.name.rpartition(".")[2] if module else "",
        smoke=smoke(),
        conditions=conditions(*packages),
        targets=dict(targets),
    )
    text = msgspec.json.encode({**figures, **msgspec.structs.asdict(line)}).decode()  # what is not a number is null
    print(text, flush=True)
    last: Figures = json.loads(text)
    return last


def cannot_run(why: str) -> None:
    """Print the reason for which this machine cannot run the benchmark, and exit with code 2."""
    sys.stderr.write(why + "\n")
    sys.exit(2)
