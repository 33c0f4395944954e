"""Engines by name: ``embedded``, ``sglang``, ``vllm``, entry points of ``headrace.engines``, ``module:attribute``.

A part of this seam is a coroutine function that opens an engine from an `EngineSetup`. It is called when a rollout
actor serves its first version. It may take `[engine.options]` in a struct of its own (`headrace.registry`). A part that
declares its needs as well is a callable object with the methods of `Demanding`, which `headrace check` and the start of
a run call. The built-in parts import torch and
their clients only when they open an engine, so a node without those libraries can still run every other actor.
"""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from headrace.config import Engine as EngineSection
from headrace.engines.base import Engine
from headrace.policy.config import PolicyConfig
from headrace.registry import Registry


class EngineSetup(NamedTuple):
    """The arguments with which an engine is opened."""

    section: EngineSection
    policy: PolicyConfig
    """With `adapter`, versions hold low-rank adapters beside the weights, and the engine has to compute with them."""
    run: Path
    """The run's folder on this node, for logs and for the tokenizer."""
    versions: Path
    """The folder of the run's versions on this node (`config.versions.folder`)."""
    id: str
    """The id of the rollout actor."""
    tokenizer: Callable[[], Awaitable[Path | None]]
    """The run's tokenizer.json, written into the run's folder; None in a run of scripted policies. EngineError."""


OpenEngine = Callable[[EngineSetup], Awaitable[Engine]]
"""Opens an engine. UnusableEngine when this machine cannot run it; EngineError when another attempt may succeed."""


Problem = tuple[str, str]
"""A key of the [engine] section, and what is wrong with its value."""


class Requirement(msgspec.Struct, frozen=True):
    """One requirement of an engine, and whether this machine meets it."""

    key: str
    """The key of the [engine] section that states it."""
    met: bool
    text: str
    """One sentence. When the requirement is not met: what is wrong, what was expected, what to do."""


@runtime_checkable
class Demanding(Protocol):
    """The methods of a part that declares what its engine needs. options: in its own type, None for a part without."""

    def problems(self, section: EngineSection, options: Any) -> Iterator[Problem]:
        """Keys of the section that this engine cannot use together: a run is refused before it starts."""

    def requirements(self, section: EngineSection, options: Any) -> Iterator[Requirement]:
        """The requirements of the engine and whether this machine meets them; `headrace check` opens no engine for
        this."""


ENGINES: Registry[OpenEngine] = Registry(
    "engines",
    {
        "embedded": "headrace.engines.embedded.part:open_engine",
        "sglang": "headrace.engines.sglang.part:SGLANG",
        "vllm": "headrace.engines.vllm.part:VLLM",
    },
    needs=("__call__",),
)


def opener(section: EngineSection) -> OpenEngine:
    """The part of the section's engine with its options. PluginError."""
    return ENGINES.bound(section.kind, section.options, "engine.options")


def problems(section: EngineSection) -> Iterator[Problem]:
    """Keys of the section that its engine cannot use. PluginError for an unknown kind or option."""
    options = ENGINES.options(section.kind, section.options, "engine.options")
    part = ENGINES.get(section.kind)
    return part.problems(section, options) if isinstance(part, Demanding) else iter(())


def requirements(section: EngineSection) -> Iterator[Requirement]:
    """The requirements of the section's engine. PluginError for an unknown kind or option."""
    options = ENGINES.options(section.kind, section.options, "engine.options")
    part = ENGINES.get(section.kind)
    return part.requirements(section, options) if isinstance(part, Demanding) else iter(())
