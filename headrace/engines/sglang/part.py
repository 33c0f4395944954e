"""SGLang as a part of the seam ``headrace.engines``: opens the engine and declares its requirements.

The client is imported only when an engine is opened, so that `headrace check` does not import torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.config import Engine as EngineSection
from headrace.engines.registry import EngineSetup, Problem, Requirement
from headrace.engines.sglang import requirements

if TYPE_CHECKING:
    from headrace.engines.sglang.engine import SglangEngine
    from headrace.engines.sglang.fleet import Fleet


class Sglang:
    """Opens an engine on a running server, or on a server that the engine starts."""

    async def __call__(self, setup: EngineSetup) -> "SglangEngine | Fleet":
        """The engine of a rollout actor. A running server is checked. UnusableEngine, EngineError."""
        from headrace.engines.sglang.open import open_engine

        return await open_engine(setup)

    def problems(self, section: EngineSection) -> Iterator[Problem]:
        """Keys that contradict each other with this engine."""
        return requirements.problems(section)

    def requirements(self, section: EngineSection) -> Iterator[Requirement]:
        """A supported release, installed or running, and the folder that holds checkpoints for it."""
        return requirements.requirements(section)


SGLANG = Sglang()
