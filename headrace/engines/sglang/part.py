"""SGLang as a part of the seam ``headrace.engines``: opens the engine and declares its requirements.

The client is imported only when an engine is opened, so that `headrace check` does not import torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.config import Engine as EngineSection
from headrace.engines.registry import EngineSetup, Problem, Requirement
from headrace.engines.server import requirements
from headrace.engines.sglang import versions
from headrace.engines.sglang.options import SglangOptions

if TYPE_CHECKING:
    from headrace.engines.server.engine import OneServer
    from headrace.engines.server.fleet import Fleet


class Sglang:
    """Opens an engine on a running server, or on servers that the engine starts."""

    async def __call__(self, setup: EngineSetup, options: SglangOptions) -> "OneServer | Fleet":
        """The engine of a rollout actor. A running server is checked. UnusableEngine, EngineError."""
        from headrace.engines.server.open import open_engine
        from headrace.engines.sglang import backend

        return await open_engine(
            setup, options, lambda wire, folder, most: backend.Sglang(setup.policy, options, wire, folder, most)
        )

    def problems(self, section: EngineSection, options: SglangOptions) -> Iterator[Problem]:
        """Keys that contradict each other with this engine."""
        return requirements.problems(section, options)

    def requirements(self, section: EngineSection, options: SglangOptions) -> Iterator[Requirement]:
        """A supported release, installed or running, and the folder that holds checkpoints for it."""
        return requirements.requirements(options, "sglang", "/server_info", _release)


def _release(key: str, release: str) -> Requirement:
    lacking = versions.lacks(release)
    if lacking:
        newest = versions.VERIFIED[-1]
        text = f"SGLang {release} lacks {lacking}; install {newest} (deploy/sglang/requirements.txt)"
        return Requirement(key, False, text)
    return Requirement(key, True, versions.said(release))


SGLANG = Sglang()
