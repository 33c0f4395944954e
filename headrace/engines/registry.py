"""Engines by name: ``embedded``, ``sglang``, entry points of ``headrace.engines``, ``module:attribute``.

A part of this seam is a coroutine function that opens an engine from an `EngineSetup`. It is imported when a rollout
actor serves its first version, so a node without that engine's libraries can still run every other actor.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from headrace.config import Engine as EngineSection
from headrace.engines.base import Engine
from headrace.policy.config import PolicyConfig
from headrace.registry import Registry


class EngineSetup(NamedTuple):
    """Everything that an engine is opened from."""

    section: EngineSection
    policy: PolicyConfig
    run: Path
    """The run's folder on this node, for logs and for the tokenizer."""
    id: str
    """The rollout actor."""
    tokenizer: Callable[[], Awaitable[Path | None]]
    """The run's tokenizer.json, written into the run's folder; None in a run of scripted policies. EngineError."""


OpenEngine = Callable[[EngineSetup], Awaitable[Engine]]
"""UnusableEngine when this machine cannot run the engine, EngineError when it may be tried again."""

ENGINES: Registry[OpenEngine] = Registry(
    "engines",
    {
        "embedded": "headrace.engines.embedded.open:open_engine",
        "sglang": "headrace.engines.sglang.open:open_engine",
    },
    needs=("__call__",),
)
